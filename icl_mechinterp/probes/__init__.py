"""Which algorithm did this model learn in context? One question per file; `probe` asks them all."""

from .report import PROBES as PROBES
from .report import probe as probe
from .report import probe_circuits as probe_circuits
from .structure import structure as structure
from .taxonomy import classify as classify
from .thresholds import THRESHOLDS as THRESHOLDS
from .thresholds import Thresholds as Thresholds
