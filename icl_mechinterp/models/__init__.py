"""Models as real `HookedTransformer`s, and the fused engine that trains them fast."""

from .attention_only import attention_only as attention_only
from .attention_only import from_circuits as from_circuits
from .coordinates import Coordinates as Coordinates
from .coordinates import fit_coordinates as fit_coordinates
from .coordinates import require_fitting as require_fitting
from .coordinates import resolve_coordinates as resolve_coordinates
from .fused import collapse as collapse
from .fused import fused_prediction as fused_prediction
from .fused import loss_and_gradients as loss_and_gradients
from .fused import reason_not_fused as reason_not_fused
from .predict import hooked_prediction as hooked_prediction
from .predict import query_mask as query_mask
from .weights import HeadWeights as HeadWeights
from .weights import ParameterStack as ParameterStack
