"""The model is the papers' formula, as a HookedTransformer that behaves as TransformerLens' users know them."""

import copy
import math

import numpy as np
import pytest
import torch
from transformer_lens import HookedTransformer

import icl_mechinterp as icl
from icl_mechinterp.models import from_circuits, hooked_prediction, query_mask
from tests.helpers import assert_close, closed_form

TASK = icl.LinearRegression(d=5, context=12, noise=0.1)


def _weights(model: HookedTransformer) -> tuple[np.ndarray, np.ndarray]:
    """KQ and OV from the raw weights, by loops that share nothing with the package."""
    attention = model.blocks[0].attn
    w_q, w_k, w_v, w_o = (getattr(attention, n).detach().double().numpy() for n in ("W_Q", "W_K", "W_V", "W_O"))
    kq = np.stack([k @ q.T / attention.attn_scale for k, q in zip(w_k, w_q, strict=True)])
    ov = np.stack([(v @ o)[:, TASK.d :].T for v, o in zip(w_v, w_o, strict=True)])
    return kq, ov


@pytest.mark.parametrize("n_heads", [1, 2, 5])
@pytest.mark.parametrize("scale", [None, 1.0], ids=["reference-scale", "paper-scale"])
def test_prediction_is_the_papers_closed_form(generator: torch.Generator, n_heads: int, scale: float | None) -> None:
    model = icl.attention_only(TASK, n_heads, scale=scale, seed=3).double()
    z, _ = TASK.sample(16, generator=generator, dtype=torch.float64)
    expected = torch.from_numpy(closed_form(z.numpy(), *_weights(model)))
    assert_close(hooked_prediction(model, z).detach(), expected, rtol=1e-9, atol=1e-12)


def test_the_query_is_hidden_with_and_without_the_callers_mask(generator: torch.Generator) -> None:
    model = icl.attention_only(TASK, 2)
    z, _ = TASK.sample(4, generator=generator)
    bare, cache = model.run_with_cache(z, start_at_layer=0)
    masked = model(z, start_at_layer=0, attention_mask=query_mask(z))
    assert torch.equal(bare[:, -1], masked[:, -1])
    pattern = cache["blocks.0.attn.hook_pattern"][:, :, -1]
    assert bool((pattern[..., -1] == 0).all())
    assert_close(pattern.sum(-1), torch.ones(4, 2))


def test_run_with_hooks_edits_act(generator: torch.Generator) -> None:
    model = icl.attention_only(TASK, 2)
    z, _ = TASK.sample(4, generator=generator)

    def zero_first_head(value: torch.Tensor, hook: object) -> torch.Tensor:
        return value * torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)

    edited = model.run_with_hooks(z, start_at_layer=0, fwd_hooks=[("blocks.0.attn.hook_z", zero_first_head)])
    kq, ov = _weights(model)
    expected = torch.from_numpy(closed_form(z.double().numpy(), kq[1:], ov[1:])).float()
    assert_close(edited[:, -1].detach(), expected, rtol=1e-4, atol=1e-6)


def test_the_mask_survives_reset_hooks_and_deepcopy(generator: torch.Generator) -> None:
    model = icl.attention_only(TASK, 2)
    z, _ = TASK.sample(4, generator=generator)
    before = model(z, start_at_layer=0)
    model.reset_hooks()
    assert torch.equal(model(z, start_at_layer=0), before)
    assert torch.equal(copy.deepcopy(model)(z, start_at_layer=0), before)


def test_other_context_lengths(generator: torch.Generator) -> None:
    model = icl.attention_only(TASK, 2).double()
    for context in (1, 3, 40):
        z, _ = TASK.sample(3, generator=generator, context=context, dtype=torch.float64)
        expected = torch.from_numpy(closed_form(z.numpy(), *_weights(model)))
        assert_close(hooked_prediction(model, z).detach(), expected, rtol=1e-9, atol=1e-12)


def test_initialisation_is_the_reference_codes_uniform() -> None:
    model = icl.attention_only(icl.LinearRegression(d=30, context=5, noise=0.1), 8, seed=1)
    attention = model.blocks[0].attn
    for name, fan_in in (("W_Q", 31), ("W_K", 31), ("W_V", 31), ("W_O", 8 * 31)):
        weight = getattr(attention, name).detach()
        bound = 1 / math.sqrt(fan_in)
        assert float(weight.abs().max()) <= bound
        assert float(weight.abs().max()) > 0.99 * bound
        assert abs(float(weight.std()) / (bound / math.sqrt(3)) - 1) < 0.02


def test_only_the_head_weights_train() -> None:
    trainable = {name for name, p in icl.attention_only(TASK, 2).named_parameters() if p.requires_grad}
    assert trainable == {f"blocks.0.attn.{name}" for name in ("W_Q", "W_K", "W_V", "W_O")}


def test_seeds_differ_and_the_global_state_is_untouched() -> None:
    before = torch.get_rng_state()
    models = [icl.attention_only(TASK, 2, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(before, torch.get_rng_state())
    queries = [model.blocks[0].attn.W_Q for model in models]
    assert torch.equal(queries[0], queries[1])
    assert not torch.equal(queries[0], queries[2])


def test_several_layers_hide_the_query_from_everybody(generator: torch.Generator) -> None:
    model = icl.attention_only(TASK, 2, n_layers=2)
    z, _ = TASK.sample(4, generator=generator)
    _, cache = model.run_with_cache(z, start_at_layer=0)
    for layer in range(2):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        assert bool((pattern[..., -1] == 0).all())
        assert bool((pattern[..., :-1] > 0).all()), "context attends to the whole context"


def test_from_circuits_is_the_inverse_of_circuits(generator: torch.Generator) -> None:
    kq, ov = torch.randn(3, 6, 6, generator=generator), torch.randn(3, 1, 6, generator=generator)
    for scale in (None, 1.0):
        found = icl.circuits(from_circuits(TASK, kq, ov, scale=scale), TASK)
        assert_close(found.kq[0], kq, atol=1e-6)
        assert_close(found.ov[0], ov, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"n_heads": 0}, "n_heads"),
        ({"n_heads": "two"}, "n_heads"),
        ({"n_heads": 2, "n_layers": 0}, "n_layers"),
        ({"n_heads": 2, "scale": -1.0}, "scale"),
        ({"n_heads": 2, "init": "orthogonal"}, "init"),
    ],
    ids=lambda value: str(value),
)
def test_mistakes(arguments: dict, field: str) -> None:
    with pytest.raises(icl.ConfigError) as caught:
        icl.attention_only(TASK, **arguments)
    assert caught.value.field == field
    assert repr(arguments[field]) in str(caught.value)
