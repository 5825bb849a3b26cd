"""Where the progress of a training run goes."""

from ._protocol import NullTracker as NullTracker
from ._protocol import Progress as Progress
from ._protocol import Tracker as Tracker
from ._protocol import guarded as guarded
from .console import ConsoleTracker as ConsoleTracker
