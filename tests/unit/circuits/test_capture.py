"""A capture records what the model does and leaves no trace of itself."""

import subprocess
import sys

import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp.circuits import Capture
from icl_mechinterp.circuits.capture import recorded
from icl_mechinterp.errors import ModelError
from tests.helpers import assert_close

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)


@pytest.fixture
def capture(generator: torch.Generator) -> Capture:
    return Capture(TASK, TASK.sample(10, generator=generator), gradients=True)


def _hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_content_is_what_run_with_cache_sees(capture: Capture) -> None:
    model = icl.attention_only(TASK, 2)
    snapshot = capture(model)
    logits, cache = model.run_with_cache(capture.prompts.z, start_at_layer=0)
    expected = cache["blocks.0.attn.hook_pattern"][:8, :, -1, :-1].transpose(0, 1)
    assert_close(snapshot.attention[0], expected.detach())
    assert torch.equal(snapshot.prediction, logits[:, -1].detach())


def test_gradients_are_those_of_the_weights(capture: Capture) -> None:
    """Chain rule back to the factors: dW_K = scale dKQ W_Q, dW_V = dOV^T (W_O W_U)^T, against autograd on the model."""
    model = icl.attention_only(TASK, 3).double()
    capture = Capture(TASK, icl.Batch(*(t.double() for t in capture.prompts)), gradients=True)
    snapshot = capture(model)
    assert all(p.grad is None for p in model.parameters()), "the user's gradients are not ours to write"
    z, target = capture.prompts
    (model(z, start_at_layer=0)[:, -1] - target).square().mean().backward()
    attention = model.blocks[0].attn
    assert snapshot.kq_gradient is not None
    assert snapshot.ov_gradient is not None
    scale = snapshot.circuits.scale[0]
    assert_close(scale * snapshot.kq_gradient[0] @ attention.W_Q.detach(), attention.W_K.grad, rtol=1e-9, atol=1e-14)
    read_out = (attention.W_O @ model.unembed.W_U).detach()
    assert_close(snapshot.ov_gradient[0].mT @ read_out.mT, attention.W_V.grad, rtol=1e-9, atol=1e-14)


def test_users_hooks_survive_and_the_forward_is_bit_identical(capture: Capture) -> None:
    model = icl.attention_only(TASK, 2)
    seen: list[int] = []
    model.add_hook("blocks.0.attn.hook_pattern", lambda value, hook: seen.append(1))
    before, clean = _hooks(model), model(capture.prompts.z, start_at_layer=0)
    count = len(seen)
    for _ in range(3):
        capture(model)
    assert _hooks(model) == before
    assert torch.equal(model(capture.prompts.z, start_at_layer=0), clean)
    assert len(seen) > count, "the user's hook still runs"


def test_hooks_are_gone_after_an_exception(capture: Capture) -> None:
    model = icl.attention_only(TASK, 2)
    capture(model)

    def fail(value: torch.Tensor, hook: object) -> None:
        raise RuntimeError("a hook of the user's")

    model.add_hook("blocks.0.attn.hook_z", fail)
    before = _hooks(model)
    with pytest.raises(RuntimeError, match="a hook of the user's"):
        capture(model)
    assert _hooks(model) == before
    with pytest.raises(RuntimeError), recorded(model, "pattern"):
        raise RuntimeError
    assert _hooks(model) == before


def test_a_snapshot_keeps_no_graph_and_no_model(capture: Capture) -> None:
    model = icl.attention_only(TASK, 2)
    snapshot = capture(model)
    for tensor in (snapshot.attention, snapshot.prediction, snapshot.kq_gradient, snapshot.circuits.kq):
        assert tensor is not None
        assert tensor.grad_fn is None
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), "a view of something larger"


def test_one_extra_forward_per_capture(capture: Capture) -> None:
    model = icl.attention_only(TASK, 2)
    capture(model)  # the first one tests the hook points
    calls: list[int] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    capture(model)
    assert len(calls) == 1


def test_a_dead_hook_point_is_refused(capture: Capture) -> None:
    model = icl.attention_only(TASK, 2)
    # a later hook that puts the clean pattern back makes every edit a silent no-op, as in some wrappers
    model.blocks[0].attn.forward = _constant_attention  # pyright: ignore
    with pytest.raises(ModelError, match=r"hook_pattern does not change the output"):
        capture(model)


def _constant_attention(query_input: torch.Tensor, **_: object) -> torch.Tensor:
    return torch.zeros_like(query_input)


def test_a_missing_hook_point_is_named() -> None:
    model = icl.attention_only(TASK, 2)
    del model.hook_dict["blocks.0.attn.hook_pattern"]
    with pytest.raises(ModelError, match=r"blocks\.0\.attn\.hook_pattern"):
        Capture(TASK, TASK.sample(4, generator=torch.Generator().manual_seed(0)))(model)


def test_gradients_of_a_deeper_model_are_refused(capture: Capture) -> None:
    with pytest.raises(ModelError, match="2 layers"):
        capture(icl.attention_only(TASK, 2, n_layers=2))


MEMORY = """
import gc, os, torch
import icl_mechinterp as icl
from icl_mechinterp.circuits import Capture

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

task = icl.LinearRegression(d=3, context=6, noise=0.1)
capture = Capture(task, task.sample(10, generator=torch.Generator().manual_seed(0)), gradients=True)
model = icl.attention_only(task, 2)
clean = model(capture.prompts.z, start_at_layer=0)
for _ in range(500):  # allocator pools fill up
    kept = capture(model)
start = resident()
for _ in range(10_000):
    kept = capture(model)
assert torch.equal(model(capture.prompts.z, start_at_layer=0), clean)
print(resident() - start)
"""


@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_captures() -> None:
    """In a process of its own: without this session's type checks a capture takes a quarter of the time."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20 * 2**20
