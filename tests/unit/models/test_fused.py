"""The fused engine computes what the HookedTransformer computes: predictions, gradients, training."""

import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp.models import (
    ParameterStack,
    collapse,
    fused,
    fused_prediction,
    hooked_prediction,
    loss_and_gradients,
    reason_not_fused,
)
from icl_mechinterp.models import _tl as tl
from icl_mechinterp.training import Settings, run_loop, start_state
from tests.helpers import assert_close

TASK = icl.LinearRegression(d=4, context=9, noise=0.1)


def _setup(seeds: int, n_heads: int, shared: bool, generator: torch.Generator, dtype: torch.dtype):
    models = [icl.attention_only(TASK, n_heads, seed=seed).to(dtype) for seed in range(seeds)]
    batches = [TASK.sample(16, generator=generator, dtype=dtype) for _ in range(1 if shared else seeds)]
    stack = ParameterStack(models)
    return models, stack, torch.stack([b.z for b in batches]), torch.stack([b.target for b in batches])


@pytest.mark.parametrize(("seeds", "shared"), [(1, True), (3, True), (3, False)], ids=["one", "shared", "own"])
@pytest.mark.parametrize("n_heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predictions_and_gradients(
    generator: torch.Generator, seeds: int, shared: bool, n_heads: int, dtype: torch.dtype
) -> None:
    models, stack, z, target = _setup(seeds, n_heads, shared, generator, dtype)
    scale, read_out = tl.attention_scale(models[0], 0), models[0].unembed.W_U.detach()
    weights, gradients = stack.heads(stack.flat.data), stack.heads(stack.grad)
    stack.grad.fill_(torch.nan)
    gradients.W_Q[..., TASK.d :, :] = 0  # never written: the query's label slot is empty
    losses = loss_and_gradients(weights, gradients, z, target, scale=scale, read_out=read_out)
    predictions = fused_prediction(collapse(weights, scale, read_out), z)
    rtol = 1e-5 if dtype == torch.float32 else 1e-12
    for seed, model in enumerate(models):
        stream = 0 if shared else seed
        hooked = hooked_prediction(model, z[stream])
        size = float(hooked.detach().abs().max())
        assert_close(predictions[seed], hooked.detach(), rtol=rtol, atol=rtol * size)
        loss = (hooked - target[stream]).square().mean()
        assert_close(losses[seed], loss.detach(), rtol=rtol)
        expected = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        for name, gradient in zip(stack.shapes, expected, strict=True):
            largest = float(gradient.abs().max())
            assert_close(stack.view(stack.grad, name)[seed], gradient, rtol=10 * rtol, atol=10 * rtol * largest)


def _trained(engine: str, seeds: list[int], **settings: object) -> ParameterStack:
    chosen = Settings(steps=200, batch=32, engine=engine, **settings)  # pyright: ignore
    state = start_state([icl.attention_only(TASK, 2, seed=seed) for seed in seeds], chosen, seeds)
    run_loop(state, TASK, chosen, [])
    return state.stack


@pytest.mark.parametrize(
    "settings", [{}, {"clip": 0.05}, {"optimizer": "sgd", "lr": 0.05}], ids=["adam", "clip", "sgd"]
)
def test_both_engines_train_to_the_same_parameters(settings: dict) -> None:
    fused, hooked = (_trained(engine, [0], **settings) for engine in ("fused", "hooked"))
    assert_close(fused.flat.detach(), hooked.flat.detach(), rtol=1e-4, atol=1e-4)
    initial = ParameterStack([icl.attention_only(TASK, 2, seed=0)])
    assert float((fused.flat - initial.flat).detach().abs().max()) > 0.05, "200 steps must move the parameters"


def test_a_seed_of_an_ensemble_is_the_single_run() -> None:
    ensemble = _trained("fused", [5, 1, 7, 2])
    for row, seed in enumerate((5, 1, 7, 2)):
        assert_close(ensemble.flat.detach()[row], _trained("fused", [seed]).flat.detach()[0], rtol=1e-3, atol=1e-5)


def test_shared_prompts_are_the_first_seeds() -> None:
    shared = _trained("fused", [3, 4], shared_prompts=True)
    assert_close(shared.flat.detach()[0], _trained("fused", [3]).flat.detach()[0], rtol=1e-3, atol=1e-5)
    own = _trained("fused", [3, 4])
    assert float((shared.flat[1] - own.flat[1]).detach().abs().max()) > 1e-4


def test_the_optimiser_is_adam_as_published() -> None:
    """Against Adam written out: m, v, bias correction, no weight decay."""
    settings = Settings(steps=5, batch=16, lr=0.01)
    model = icl.attention_only(TASK, 2, seed=0)
    reference = icl.attention_only(TASK, 2, seed=0)
    state = start_state([model], settings, [0])
    generator = torch.Generator()
    generator.set_state(state.generator_states[0].clone())
    run_loop(state, TASK, settings, [])
    parameters = [p for p in reference.parameters() if p.requires_grad]
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for step in range(1, 6):
        z, target = TASK.sample(16, generator=generator)
        gradients = torch.autograd.grad((hooked_prediction(reference, z) - target).square().mean(), parameters)
        for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            p.data -= 0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    for trained, expected in zip((p for p in model.parameters() if p.requires_grad), parameters, strict=True):
        assert_close(trained.detach(), expected.detach(), rtol=1e-3, atol=1e-6)


def test_models_share_no_storage_after_release() -> None:
    stack = _trained("fused", [0, 1])
    stack.release()
    assert stack.models[0].blocks[0].attn.W_Q.untyped_storage().nbytes() == 2 * 5 * 5 * 4


@pytest.mark.parametrize("change", ["layers", "bias"])
def test_what_the_engine_cannot_express_is_named(change: str) -> None:
    model = icl.attention_only(TASK, 2, n_layers=2 if change == "layers" else 1)
    if change == "bias":
        model.blocks[0].attn.b_V.data += 1
    reason = reason_not_fused(model)
    assert reason is not None
    assert change in reason.replace("biases", "bias")
    settings = Settings(steps=1, batch=4)
    with pytest.raises(icl.ConfigError, match="engine='hooked'"):
        run_loop(start_state([model], settings, [0]), TASK, settings, [])


def test_equal_shapes_are_required() -> None:
    with pytest.raises(icl.ConfigError, match="equal shapes"):
        ParameterStack([icl.attention_only(TASK, 1), icl.attention_only(TASK, 2)])
    model = icl.attention_only(TASK, 1)
    with pytest.raises(icl.ConfigError, match="twice"):
        ParameterStack([model, model])


@pytest.mark.parametrize("shared", [True, False])
def test_a_batch_in_parts_gives_the_same(
    generator: torch.Generator, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In five parts of three prompts and one of one; float64, so that only a mistake is seen."""
    models, stack, z, target = _setup(2, 3, shared, generator, torch.float64)
    scale, read_out = tl.attention_scale(models[0], 0), models[0].unembed.W_U.detach()
    weights, gradients = stack.heads(stack.flat.data), stack.heads(stack.grad)

    def computed() -> tuple[torch.Tensor, torch.Tensor]:
        losses = loss_and_gradients(weights, gradients, z, target, scale=scale, read_out=read_out)
        return losses, stack.grad.clone()

    whole = computed()
    folded = 6  # heads of all seeds; with own prompts the streams take their place
    monkeypatch.setattr(fused, "_SCORES", 3 * folded * (TASK.context + 1))
    for in_parts, at_once in zip(computed(), whole, strict=True):
        assert_close(in_parts, at_once, rtol=1e-12, atol=1e-14)
