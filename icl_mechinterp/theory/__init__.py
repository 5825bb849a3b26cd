"""What theory says a one-layer softmax model learns on isotropic in-context linear regression, and how well it does.

    x ~ N(0, I_d),  beta ~ N(0, I_d / d),  y = beta^T x + eps,  eps ~ N(0, σ²)

with L context tokens; every risk and loss is the mean squared error on the query's label, so that it contains σ²
(`noise`). Formulas follow arXiv 2503.12734; each docstring says where its formula stands there or how it comes about.

Numbers in give a number out and arrays broadcast, always in float64. This package knows no model: agreement between a
trained model and these formulas is evidence, because nothing here was fitted to one.
"""

from ._anisotropic import optimal_gd_preconditioner as optimal_gd_preconditioner
from ._anisotropic import optimal_preconditioner as optimal_preconditioner
from ._anisotropic import preconditioned_gd_risk as preconditioned_gd_risk
from ._anisotropic import preconditioned_risk as preconditioned_risk
from ._approximate_loss import approximate_loss as approximate_loss
from ._approximate_loss import manifold_loss as manifold_loss
from ._approximate_loss import single_head_optimum as single_head_optimum
from ._approximate_loss import solution_manifold as solution_manifold
from ._gradient_flow import Flow as Flow
from ._gradient_flow import gradient_flow as gradient_flow
from ._kernel_heads import HeadMoments as HeadMoments
from ._kernel_heads import head_moments as head_moments
from ._kernel_heads import kernel_loss as kernel_loss
from ._kernel_heads import kernel_regressor_loss as kernel_regressor_loss
from ._predictors import debiased_gd as debiased_gd
from ._predictors import gd as gd
from ._predictors import nadaraya_watson as nadaraya_watson
from ._predictors import ridge as ridge
from ._risk import bayes_ratio_bound as bayes_ratio_bound
from ._risk import bayes_risk as bayes_risk
from ._risk import bayes_risk_limit as bayes_risk_limit
from ._risk import debiased_gd_risk as debiased_gd_risk
from ._risk import debiased_gd_risk_limit as debiased_gd_risk_limit
from ._risk import equal_risk_step as equal_risk_step
from ._risk import gd_risk as gd_risk
from ._risk import optimal_gd_step as optimal_gd_step
from ._risk import optimal_step as optimal_step
