"""Which algorithm did this model learn in context? One question per file; `probe` asks them all."""

from .ablation import ablation as ablation
from .hook_patching import patch_hook as patch_hook
from .hook_patching import patch_sweep as patch_sweep
from .interchange import interchange as interchange
from .patching import patching as patching
from .report import CAUSAL_PROBES as CAUSAL_PROBES
from .report import CHECKPOINT_PROBES as CHECKPOINT_PROBES
from .report import PROBES as PROBES
from .report import probe as probe
from .report import probe_circuits as probe_circuits
from .structure import structure as structure
from .taxonomy import classify as classify
from .thresholds import THRESHOLDS as THRESHOLDS
from .thresholds import Thresholds as Thresholds
