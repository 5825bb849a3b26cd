"""What a one-layer model computes for the query, taken apart: the place where interventions act.

    s_h,l = z_l^T KQ_h z_query          scores            [batch head key_pos]
    v_h,l = OV_h z_l                    values            [batch head key_pos out]
    o_h   = sum_l softmax(s_h)_l v_h,l  outputs per head  [batch head out]
    yhat  = sum_h o_h

Query, keys and values may come from different prompts, and the softmax denominator from yet another; so every
interchange and patch is a call with other arguments. A full hooked forward costs a hundred times more, so the row is
what the causal probes run on, after `require_same_as_model` has held it against the model once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from transformer_lens import HookedTransformer

from .._types import Predictions, Prompts
from ..circuits import Circuits
from ..errors import ModelError
from ..models import Coordinates, hooked_prediction, reason_not_fused
from ..results import HeadVerdict

Scores = Float[torch.Tensor, "batch head key_pos"]
Values = Float[torch.Tensor, "batch head key_pos out"]
Outputs = Float[torch.Tensor, "batch head out"]

_TOLERANCE = 1e4  # in units of the model's machine epsilon, relative to the size of its predictions
_FLOOR = 1e-3  # of the labels' size: predictions are compared relative to this where they are smaller
_COMPARED = 32  # prompts on which row and model are held against each other
_BYTES = 64 * 2**20
_CHUNK = 256  # prompts at a time: scores and values of four heads at L = 40 stay in the cache


@dataclass(frozen=True)
class Row:
    """The circuits of a one-layer model, float64, ready to be run on the query's row.

    Attributes:
        kq: logit coefficients `[head key query]`, attention scale included.
        ov: map from the attended token to the prediction `[head out token]`.
        d: number of covariates.
    """

    kq: Float[torch.Tensor, "head key query"]
    ov: Float[torch.Tensor, "head out token"]
    d: int

    @classmethod
    def of(cls, circuits: Circuits) -> "Row":
        """From the circuits of a one-layer model."""
        assert circuits.n_layers == 1, "a row is the whole computation only in one layer"
        return cls(circuits.kq[0].double(), circuits.ov[0].double(), circuits.d)

    @classmethod
    def ideal(cls, heads: Sequence[HeadVerdict], d: int) -> "Row":
        """What the taxonomy says the heads are, and nothing else: KQ = omega_h I, OV reads the label with mu_h.

        The prediction is sum_h mu_h sum_l softmax_l(omega_h x_l.x_q) y_l; dummies keep their own omega and mu.
        """
        kq, ov = torch.zeros(len(heads), d + 1, d + 1).double(), torch.zeros(len(heads), 1, d + 1).double()
        for index, head in enumerate(heads):
            kq[index].diagonal()[:d] = head.omega
            ov[index, 0, d] = head.mu
        return cls(kq, ov, d)

    @property
    def reads_label_keys(self) -> bool:
        """Whether labels move the attention; always, if only slightly, in a trained model."""
        return bool(self.kq[:, self.d :, : self.d].any())

    def blind_to_label_keys(self) -> "Row":
        """The same model with keys that do not read labels: its predictions are linear in them."""
        kq = self.kq.clone()
        kq[:, self.d :] = 0.0
        return Row(kq, self.ov, self.d)

    def scores(self, queries: Prompts, keys: Prompts) -> Scores:
        """Logits of the query of `queries` against the context tokens of `keys`; its label slots are zero."""
        into_query = queries[:, -1, : self.d] @ self.kq[..., : self.d].mT  # [head batch key]
        return torch.einsum("hbk,blk->bhl", into_query, keys[:, :-1])

    def values(self, prompts: Prompts) -> Values:
        """What each context token would add if it were attended to."""
        return torch.einsum("hot,blt->bhlo", self.ov, prompts[:, :-1])

    def outputs(self, prompts: Prompts) -> Outputs:
        """Each head's contribution to the clean prediction."""
        return torch.cat([attend(self.scores(part, part), self.values(part)) for part in prompts.split(_CHUNK)])

    def predict(self, prompts: Prompts) -> Predictions:
        """The clean prediction."""
        return self.outputs(prompts).sum(1)


def attend(scores: Scores, values: Values, *, normaliser_of: Scores | None = None) -> Outputs:
    """Attention-weighted values per head.

    Args:
        scores: of the query against the keys.
        values: of the same context tokens.
        normaliser_of: take the softmax denominator sum_l exp(s_l) from these scores instead.
    """
    log_denominator = torch.logsumexp(scores if normaliser_of is None else normaliser_of, dim=-1, keepdim=True)
    return torch.einsum("bhl,bhlo->bho", (scores - log_denominator).exp(), values)


def forward_prediction(model: HookedTransformer, z: Prompts, coordinates: Coordinates | None = None) -> Predictions:
    """What the model's own forward predicts, in its own precision and on its device, as float64 on the CPU."""
    like = next(model.parameters())
    maps = None if coordinates is None else coordinates.to(like)
    with torch.no_grad():
        parts = [
            hooked_prediction(model, part.to(like.device, like.dtype), coordinates=maps)
            for part in z.split(affordable(model.cfg.n_heads, z.shape[1]))
        ]
        return torch.cat(parts).cpu().double()


def affordable(n_heads: int, pos: int) -> int:
    """Prompts at a time whose attention scores, of every position to every other, fill 64 MB."""
    return max(1, _BYTES // (8 * n_heads * pos**2))


def require_same_as_model(
    row: Row, model: HookedTransformer, z: Prompts, coordinates: Coordinates | None = None
) -> None:
    """Checks once that the row is what the model computes, hooks of the user's included.

    Raises:
        ModelError: the model has parts that circuits cannot express, or predicts something else.
    """
    reason = reason_not_fused(model)
    if reason is not None:
        raise ModelError(f"interventions on the query's row need a one-layer attention-only model; {reason}.")
    dtype = next(model.parameters()).dtype
    eps = torch.finfo(dtype).eps
    if eps > torch.finfo(torch.float32).eps:
        raise ModelError(
            f"the weights are {str(dtype).removeprefix('torch.')}, with too few digits to hold the circuits against the "
            "model's own forward pass. Probe it in float32: model.float()."
        )
    hooked = forward_prediction(model, z, coordinates)
    labels = z[:, :-1, row.d :]
    # the floor is for models that predict next to nothing: rounding, which is relative to the labels, is no difference
    size = max(float(hooked.square().mean().sqrt()), _FLOOR * float(labels.square().mean().sqrt())) or 1.0
    gap = float((row.predict(z.to(dtype).double()) - hooked).abs().max()) / size
    if not gap <= _TOLERANCE * eps:  # also where it is not a number
        raise ModelError(
            f"the model predicts something else than its circuits do (by {gap:.2g} of the predictions' size): a hook "
            "changes its forward pass. Remove that hook, or probe the model without the causal probes."
        )


def not_one_layer_one_label(circuits: Circuits) -> str:
    """Why heads have no taxonomy, and no theory that they could be held against."""
    layers = "" if circuits.n_layers == 1 else f"{circuits.n_layers} layers"
    labels = "" if circuits.ov.shape[-2] == 1 else f"{circuits.ov.shape[-2]} label slots"
    return (
        f"the model has {' and '.join(filter(None, (layers, labels)))}; this is asked of one-layer models with one label, "
        "whose heads read the context labels directly"
    )


def row_or_reason(
    model: HookedTransformer,
    circuits: Circuits,
    heads: Sequence[HeadVerdict],
    prompts: Prompts,
    coordinates: Coordinates | None = None,
) -> Row | str:
    """The row of a model on which interventions say something, or why there is none.

    Args:
        model: whose forward, hooks included, the row must reproduce.
        circuits: of the model.
        heads: its taxonomy, empty for models of several layers or labels.
        prompts: some on which both are compared.
        coordinates: of a model with its own embedding.
    """
    if not heads:
        return not_one_layer_one_label(circuits)
    row = Row.of(circuits)
    try:
        require_same_as_model(row, model, prompts[:_COMPARED], coordinates)
    except ModelError as error:
        return str(error)
    return row
