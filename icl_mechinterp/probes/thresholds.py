"""Every threshold of the probes, in one place, with where it comes from.

"Published" numbers are those of arXiv 2503.12734 and its released notebook; "trained" ones are our own runs and
"planted" ones models whose verdict is known by construction. The calibration that measured the last two, with error
rates, is benchmarks/taxonomy_error_rates.py and reports/LOG.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Bounds that decide; each measurement quotes its own.

    Attributes:
        dummy_share: a head below this share of sum |mu omega| is a dummy. Below the 1 % at which a head must still
            show, above the shares that trained dummies reach (published: 1e-3 and less).
        hidden_share: a head whose diagonal has both signs can have a mean near zero; it is still no dummy if
            |mu| times the mean |diagonal| is more than this share. A flat head's diagonal is noise (trained: below .01
            at mu of 3, a share of .03).
        opposite_diagonal: a diagonal has both signs when the smaller side reaches this fraction of the larger.
        off_diagonal_energy: published .0015 for H = 2 and 4, .043 for H = 8, whose matrices are not clean yet.
        within_head_spread: published .015.
        across_head_spread: published max/min of |omega| is at most 1.05.
        label_key_leakage: published at most .012; trained at a constant rate .02.
        ov_last_entry: published .9997 and more.
        sign_matching: share of the mass; a head with 1 % of it must not decide.
        zero_sum: published .005.
        effective_step_gap: published steps are within 1 % of theory; trained at a constant rate within 1.2 %.
        manifold_gap: published within 1.4 %.
        excess_loss: of the variance that the best debiased GD explains; trained at a constant rate .002.
        distance_debiased_gd: trained at a constant rate .002 (H = 2) to .003 (H = 8); vanilla GD is .005 away, the
            kernel regressor .2.
        shift: as a fraction of what vanilla GD with the same step shows on the same prompts, because that falls with L.
        kernel_distance: largest distance at which a single kernel is called what the model computes.
    """

    dummy_share: float = 0.005
    hidden_share: float = 0.05
    opposite_diagonal: float = 0.1
    off_diagonal_energy: float = 0.01
    within_head_spread: float = 0.05
    across_head_spread: float = 0.05
    label_key_leakage: float = 0.05
    ov_last_entry: float = 0.995
    sign_matching: float = 0.95
    zero_sum: float = 0.03
    effective_step_gap: float = 0.03
    manifold_gap: float = 0.03
    excess_loss: float = 0.02
    distance_debiased_gd: float = 0.005
    shift: float = 0.25
    kernel_distance: float = 0.01


THRESHOLDS = Thresholds()
"""The defaults."""
