"""From the residual stream to task coordinates and back.

A model of ours carries the prompt itself in its residual stream, so both maps are trivial. A model with an own embedding
does not: `read_in` takes a token's coordinates into the residual stream, `read_out` takes the residual stream at the
query to the prediction. Circuits are always reported in task coordinates.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from transformer_lens import HookedTransformer

from ..errors import ModelError
from ..tasks import Task


class Coordinates(NamedTuple):
    """Linear read-in and read-out.

    Attributes:
        read_in: `[token d_model]`; a token z enters the residual stream as z @ read_in.
        read_out: `[d_model out]`; the prediction is residual @ read_out.
    """

    read_in: Float[torch.Tensor, "token d_model"]
    read_out: Float[torch.Tensor, "d_model out"]


def resolve_coordinates(model: HookedTransformer, task: Task) -> Coordinates:
    """The maps of a model whose residual stream is the prompt: identity, and its own W_U.

    Raises:
        ModelError: the width of the model is not the width of a token.
    """
    width = task.d + task.n_out
    if model.cfg.d_model != width or model.cfg.d_vocab_out != task.n_out:
        raise ModelError(
            f"a prompt of this task has d + N = {task.d} + {task.n_out} = {width} coordinates per token and {task.n_out} "
            f"output(s); the model has d_model = {model.cfg.d_model} and {model.cfg.d_vocab_out} output(s). Probe it "
            "with the task that it was trained on."
        )
    W_U = model.unembed.W_U.detach()
    return Coordinates(torch.eye(width, dtype=W_U.dtype, device=W_U.device), W_U)
