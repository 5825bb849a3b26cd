"""Patches through a model's own hooks: a two-layer model against the same edits written out by hand."""

import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp.errors import ConfigError, ModelError
from icl_mechinterp.models import hooked_prediction
from icl_mechinterp.probes.hook_patching import patch_hook, patch_sweep
from icl_mechinterp.probes.patching import patched
from icl_mechinterp.probes.row import Row
from tests.helpers import assert_close

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)  # 7 positions, tokens of width 4


@pytest.fixture
def deep():
    """Two layers of three heads, each as wide as two coordinates; large enough for the second to read the first."""
    return icl.attention_only(TASK, 3, n_layers=2, d_head=2, seed=1, init_scale=2.0).double()


@pytest.fixture(scope="module")
def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    first, second = (TASK.sample(5, generator=generator, dtype=torch.float64).z for _ in range(2))
    return first, second


def hooks_of(model) -> list[int]:
    return [len(module._forward_hooks) for module in model.modules()]


def by_hand(model, receiver, donor, name, edit) -> torch.Tensor:
    """`edit(value, donated)` in place at one hook point."""
    _, cache = model.run_with_cache(donor, start_at_layer=0)

    def hook(value, hook):
        value = value.clone()
        edit(value, cache[name])
        return value

    with torch.no_grad():
        return model.run_with_hooks(receiver, start_at_layer=0, fwd_hooks=[(name, hook)])[:, -1]


def put(*index):
    def edit(value, donated):
        value[index] = donated[index]

    return edit


ALL = slice(None)
CASES = {
    "head output": ("blocks.0.attn.hook_z", {"heads": [1]}, (ALL, ALL, 1)),
    "value at a token": ("blocks.1.attn.hook_v", {"heads": [2], "positions": [3]}, (ALL, 3, 2)),
    "key at a token": ("blocks.0.attn.hook_k", {"positions": [0]}, (ALL, 0)),
    "query": ("blocks.1.attn.hook_q", {"heads": [0]}, (ALL, ALL, 0)),
    "pattern to a key": ("blocks.0.attn.hook_pattern", {"heads": [0], "positions": [4]}, (ALL, 0, ALL, 4)),
    "scores of a head": ("blocks.1.attn.hook_attn_scores", {"heads": [2]}, (ALL, 2)),
    "residual stream": ("blocks.1.hook_resid_pre", {"positions": [2]}, (ALL, 2)),
    "attention output": ("blocks.0.hook_attn_out", {"positions": [6]}, (ALL, 6)),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("direction", ["noising", "denoising"])
def test_a_patch_is_the_edit_by_hand(deep, prompts, case, direction):
    name, options, index = CASES[case]
    receiver, donor = prompts if direction == "noising" else prompts[::-1]
    expected = by_hand(deep, receiver, donor, name, put(*index))
    assert torch.equal(patch_hook(deep, *prompts, name, direction=direction, **options), expected)
    assert not torch.equal(expected, hooked_prediction(deep, receiver).detach())


def test_patching_the_whole_stream_is_the_other_prompt(deep, prompts):
    found = patch_hook(deep, *prompts, "blocks.0.hook_resid_pre")
    assert torch.equal(found, hooked_prediction(deep, prompts[1]).detach())
    back = patch_hook(deep, *prompts, "blocks.0.hook_resid_pre", direction="denoising")
    assert torch.equal(back, hooked_prediction(deep, prompts[0]).detach())


def test_on_one_layer_it_is_the_patch_of_the_row(prompts):
    model = icl.attention_only(TASK, 3, seed=2).double()
    row = Row.of(icl.circuits(model, TASK))
    for hook, path in (("z", "output"), ("v", "value"), ("attn_scores", "scores"), ("pattern", "pattern")):
        found = patch_hook(model, *prompts, f"blocks.0.attn.hook_{hook}", heads=[0, 2])
        assert_close(found, patched(row, *prompts, path, heads=[0, 2]), rtol=1e-9, atol=1e-12)


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_a_sweep_counts_positions_on_axis_minus_two_and_heads_on_the_activation(deep, prompts):
    """Seven positions of tokens of width four: counting on the last axis would sweep four."""
    sweep = patch_sweep(deep, *prompts, "blocks.0.attn.hook_z", over=("head", "position"))
    assert sweep.predictions.shape == (3, 7, 5, 1)
    for head, position in ((0, 0), (1, 6), (2, 4)):
        expected = by_hand(deep, *prompts, "blocks.0.attn.hook_z", put(ALL, position, head))
        assert torch.equal(sweep.predictions[head, position], expected)
    turned = patch_sweep(deep, *prompts, "blocks.0.attn.hook_z", over=("position", "head"))
    assert torch.equal(turned.predictions, sweep.predictions.transpose(0, 1))


def test_a_sweep_works_at_another_context_length_than_the_models(deep):
    generator = torch.Generator().manual_seed(1)
    clean, corrupted = (TASK.sample(2, generator=generator, context=11, dtype=torch.float64).z for _ in range(2))
    assert patch_sweep(deep, clean, corrupted, "blocks.1.hook_resid_pre").predictions.shape == (12, 2, 1)


def test_metrics_of_a_sweep_are_their_formulas(deep, prompts):
    target = torch.arange(5.0, dtype=torch.float64)[:, None]
    sweep = patch_sweep(deep, *prompts, "blocks.1.hook_resid_pre", direction="denoising")
    clean, corrupted = (hooked_prediction(deep, z).detach() for z in prompts)
    for position in (0, 6):
        now = by_hand(deep, prompts[1], prompts[0], "blocks.1.hook_resid_pre", put(ALL, position))
        change = (now - corrupted).square().mean() / clean.var(correction=0)
        assert_close(sweep.change[position], change, rtol=1e-9)
        losses = [(target - yhat).square().mean() for yhat in (clean, corrupted, now)]
        restored = (losses[1] - losses[2]) / (losses[1] - losses[0])
        assert_close(sweep.restored(target)[position], restored, rtol=1e-9)
    assert sweep.direction == "denoising"


def test_in_the_last_layer_only_the_querys_output_matters(deep, prompts):
    sweep = patch_sweep(deep, *prompts, "blocks.1.attn.hook_z")
    assert torch.equal(sweep.change[:-1], torch.zeros(6, dtype=torch.float64))
    assert float(sweep.change[-1]) > 0


# --- hooks leave no trace ---------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was(deep, prompts):
    seen = []
    deep.add_hook("blocks.0.attn.hook_z", lambda value, hook: seen.append(1))
    before, clean = hooks_of(deep), hooked_prediction(deep, prompts[0]).detach()
    parameters = {name: value.clone() for name, value in deep.named_parameters()}
    patch_sweep(deep, *prompts, "blocks.0.attn.hook_z", over=("head",))
    assert hooks_of(deep) == before
    assert torch.equal(hooked_prediction(deep, prompts[0]).detach(), clean)
    assert all(torch.equal(value, parameters[name]) and value.grad is None for name, value in deep.named_parameters())
    assert len(seen) > 3  # the user's hook ran inside our passes, and is still there


def test_hooks_are_removed_after_an_exception(deep, prompts):
    before = hooks_of(deep)

    def fail(value, hook):
        raise RuntimeError("a user's hook failed")

    with deep.hooks(fwd_hooks=[("blocks.1.hook_resid_post", fail)]), pytest.raises(RuntimeError, match="hook failed"):
        patch_hook(deep, *prompts, "blocks.0.attn.hook_z")
    assert hooks_of(deep) == before


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_hook_point_that_never_fires_is_refused(deep, prompts):
    with pytest.raises(ModelError, match=r"does not change the prediction.*use_attn_result"):
        patch_hook(deep, *prompts, "blocks.0.attn.hook_result")
    deep.set_use_attn_result(True)
    found = patch_hook(deep, *prompts, "blocks.0.attn.hook_result", heads=[1])
    assert_close(found, patch_hook(deep, *prompts, "blocks.0.attn.hook_z", heads=[1]), rtol=1e-9, atol=1e-12)


def test_an_unknown_hook_point_is_refused(deep, prompts):
    with pytest.raises(ModelError, match=r"no hook point 'blocks.7.attn.hook_z'.*Did you mean"):
        patch_hook(deep, *prompts, "blocks.7.attn.hook_z")
    with pytest.raises(ConfigError, match=r"axes of 'blocks.0.ln1.hook_scale' are not known"):
        patch_hook(deep, *prompts, "blocks.0.ln1.hook_scale")


def test_prompts_of_two_lengths_and_places_that_are_not_there_are_refused(deep, prompts):
    with pytest.raises(ConfigError, match=r"\(5, 7, 4\) and \(5, 5, 4\)"):
        patch_hook(deep, prompts[0], prompts[1][:, 2:], "blocks.0.attn.hook_z")
    with pytest.raises(ConfigError, match=r"has 3 heads; got \[3\]"):
        patch_hook(deep, *prompts, "blocks.0.attn.hook_z", heads=[3])
    with pytest.raises(ConfigError, match=r"has 7 positions; got \[-1\]"):
        patch_hook(deep, *prompts, "blocks.0.attn.hook_z", positions=[-1])
    with pytest.raises(ConfigError, match=r"has 0 heads"):
        patch_hook(deep, *prompts, "blocks.0.hook_resid_pre", heads=[0])
    with pytest.raises(ConfigError, match=r"no head axis; sweep over \('position',\)"):
        patch_sweep(deep, *prompts, "blocks.0.hook_resid_pre", over=("head",))
