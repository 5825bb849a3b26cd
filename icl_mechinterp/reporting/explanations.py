"""What each measurement asks, in a line for a reader who is new to it, with its formula.

Notation: KQ_xx is the covariate block of a head's KQ; ω the mean of its diagonal; μ the label entry of OV; yhat the
model's prediction. Means "over heads" leave dummies out and weigh heads by their share of Σ|μω|.
"""

EXPLANATIONS: dict[str, str] = {
    "off_diagonal_energy": (
        "Does a head compare each covariate only with itself? Fraction of KQ off its diagonal: "
        "1 − ‖diag KQ_xx‖² / ‖KQ_xx‖²."
    ),
    "within_head_spread": (
        "Does a head treat all covariates alike? Standard deviation over |mean| of the diagonal of KQ_xx."
    ),
    "across_head_spread": (
        "Do all heads share one size of ω? Weighted standard deviation of |ω| over its weighted mean γ."
    ),
    "label_key_leakage": ("Do labels stay out of the choice of where to attend? max |KQ[label, x]| / |ω|."),
    "ov_last_entry": ("Does a head read out the label and nothing else? |OV[label]| / ‖OV‖."),
    "sign_matching": ("Does each head's output point the way its attention does? Share of heads with sign ω = sign μ."),
    "zero_sum": (
        "Do positive and negative heads cancel, so that means drop out? |Σ μ| / Σ |μ|, all heads; 1 for a lone head."
    ),
    "effective_step": ("The step of gradient descent that the heads take together: η = Σ μω over all heads."),
    "effective_step_gap": ("Is that step the best one? |η / η* − 1|, η* the step of least risk."),
    "manifold_gap": (
        "Are the outputs where theory puts them for this γ? The larger of |μ₊/μ_γ − 1| and |μ₋/μ_γ − 1|, "
        "μ₊ and μ₋ summed over each sign."
    ),
    "loss": (
        "How well does it predict? E(target − yhat)² on fresh prompts, label noise included; the reference is the best "
        "debiased gradient descent."
    ),
    "distance_debiased_gd": (
        "Does it predict what one mean-centred gradient step with its own η predicts? E(yhat − y_dGD)² / Var(yhat)."
    ),
    "distance_gd": (
        "Plain gradient descent with the same step, for comparison: E(yhat − y_GD)² / Var(yhat); must be farther away "
        "than debiased gradient descent."
    ),
    "distance_ridge": (
        "Ridge regression with penalty dσ², for comparison: E(yhat − y_ridge)² / Var(yhat); must be farther away than "
        "debiased gradient descent."
    ),
    "distance_nadaraya_watson": (
        "The one kernel smoother (ω, μ) that fits best, for comparison: E(yhat − y_NW)² / Var(yhat); must be farther "
        "away than debiased gradient descent."
    ),
    "shift_covariates": (
        "Do predictions stay when every context covariate moves by +1, as centring demands? "
        "E(change of yhat)² / Var(yhat)."
    ),
    "shift_labels": (
        "Do predictions stay when every context label moves by +1, as centring demands? E(change of yhat)² / Var(yhat)."
    ),
    "keep_structure": (
        "Is the theory's structure all that matters? The model with only KQ's diagonal and OV's label entry kept, against "
        "the whole: E(yhat_kept − yhat)² / Var(yhat)."
    ),
    "remove_diagonal_loss": (
        "Does the diagonal of KQ do the work? Loss without it; the reference E t² is what predicting zero costs."
    ),
    "drop_dummies": "Do dummy heads do nothing? The model without them: E(yhat_dropped − yhat)² / Var(yhat).",
    "head_effect_gap": (
        "Does each head do what its (ω, μ) says? Worst relative gap, over ablated heads, between the loss and that of "
        "heads μ Σ softmax(ω x·x_q) y on the same prompts."
    ),
    "path_sum_gap": (
        "Do effects along paths (query, key, value, output, interactions) add up to the total effect? "
        "|sum − total| / total; an identity in one layer."
    ),
    "head_loss_share": (
        "Does each head's share of the loss, E[o_h (2t − yhat)] / (E t² − loss), fit its (ω, μ)? The largest departure."
    ),
    "interchange_debiased_gd": (
        "Does it mix two prompts' query, keys and values as debiased gradient descent does? "
        "1 − E(yhat* − y_dGD*)² / Var(yhat*), the least of three interchanges."
    ),
    "interchange_gd": "The same score for plain gradient descent; must be lower than that of debiased gradient descent.",
    "interchange_ridge": "The same score for ridge regression; must be lower than that of debiased gradient descent.",
    "interchange_nadaraya_watson": (
        "The same score for the one kernel smoother that fits best; must be lower than that of debiased gradient descent."
    ),
    "interchange_mean_of_labels": (
        "The same score for the mean of the labels; must be lower than that of debiased gradient descent."
    ),
    "normaliser": (
        "Does the softmax denominator carry the mean that debiasing subtracts? Taken from a second context: share of the "
        "change predicted from that context's mean."
    ),
}
"""By name of the measurement; a name that is not here is shown without a line."""
