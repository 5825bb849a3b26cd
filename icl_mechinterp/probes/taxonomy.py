"""What did each head become: positive, negative, dummy or mixed?

A head is called by what it does, mu omega, not by one weight: a large KQ behind an OV of zero does nothing, and a flat
head (omega = 0) only adds mu times the mean label, which shows in `zero_sum` and `shift_labels`. Structural departures
(a dense KQ, an unequal diagonal, label keys) leave the label alone and fail their own measurement.

    omega_h = mean_i KQ_h[x_i, x_i],   mu_h = OV_h[y, y],   share_h = |mu_h omega_h| / sum_h |mu_h omega_h|
                                                                                   (2503.12734, definitions of sec. 3)
"""

import numpy as np
from jaxtyping import Float

from ..circuits import Circuits
from ..results import HeadLabel, HeadVerdict
from .thresholds import THRESHOLDS, Thresholds


def classify(circuits: Circuits, thresholds: Thresholds = THRESHOLDS) -> tuple[HeadVerdict, ...]:
    """One verdict per head of a one-layer, one-label model; empty for other models, whose heads may read each other.

    Args:
        circuits: of the model.
        thresholds: margins; the defaults are calibrated on planted models.
    """
    if circuits.n_layers != 1 or circuits.ov.shape[-2] != 1:
        return ()
    diagonals = head_diagonals(circuits)
    omegas, mus = diagonals.mean(1), label_outputs(circuits)
    shares = _normalised(np.abs(mus * omegas))
    strengths = _normalised(np.abs(mus) * np.abs(diagonals).mean(1))
    verdicts = []
    for head in range(circuits.n_heads):
        both_signs = _has_both_signs(diagonals[head], thresholds)
        hidden = both_signs and bool(strengths[head] >= thresholds.hidden_share)
        label = _label(float(omegas[head]), float(mus[head]), float(shares[head]), hidden, thresholds)
        margin = abs(float(shares[head]) - thresholds.dummy_share)
        if both_signs:
            margin = min(margin, abs(float(strengths[head]) - thresholds.hidden_share))
        verdicts.append(HeadVerdict(0, head, label, float(omegas[head]), float(mus[head]), float(shares[head]), margin))
    return tuple(verdicts)


def head_diagonals(circuits: Circuits) -> Float[np.ndarray, "head covariate"]:
    """KQ's diagonal on the covariates, float64, heads of the first layer."""
    return np.diagonal(circuits.kq[0, :, : circuits.d, : circuits.d].double().numpy(), axis1=1, axis2=2)


def label_outputs(circuits: Circuits) -> Float[np.ndarray, " head"]:
    """mu: OV's label entry, float64, heads of the first layer."""
    return circuits.ov[0, :, 0, circuits.d].double().numpy()


def _label(omega: float, mu: float, share: float, hidden: bool, thresholds: Thresholds) -> HeadLabel:
    if hidden:
        return "mixed"
    if share < thresholds.dummy_share:
        return "dummy"
    if omega * mu < 0:
        return "mixed"
    return "positive" if omega > 0 else "negative"


def _has_both_signs(diagonal: Float[np.ndarray, " covariate"], thresholds: Thresholds) -> bool:
    low, high = float(diagonal.min()), float(diagonal.max())
    return low < 0 < high and min(-low, high) > thresholds.opposite_diagonal * max(-low, high)


def _normalised(values: Float[np.ndarray, " head"]) -> Float[np.ndarray, " head"]:
    total = values.sum()
    return values / total if total > 0 else np.zeros_like(values)
