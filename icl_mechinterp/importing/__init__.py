"""Weights trained elsewhere become a `HookedTransformer` and a run; models of ours go back into such weights."""

from .export import export_weights as export_weights
from .layouts import LAYOUTS as LAYOUTS
from .layouts import Layout as Layout
from .read import Imported as Imported
from .read import import_weights as import_weights
from .read import read_weights as read_weights
from .read import save_run as save_run
from .state import WeightsError as WeightsError
