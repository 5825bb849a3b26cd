"""The optimisers are torch's, bit for bit."""

import pytest
import torch

from icl_mechinterp.training.optimizer import Name, make_optimizer


@pytest.mark.parametrize(("name", "reference"), [("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_parameters_as_torchs(generator: torch.Generator, name: Name, reference: type, dtype: torch.dtype) -> None:
    flat = torch.randn(3, 50, generator=generator, dtype=dtype)
    theirs, gradient = torch.nn.Parameter(flat.clone()), torch.zeros_like(flat)
    theirs.grad = gradient
    ours, judge = make_optimizer(name, flat, gradient), reference([theirs], lr=1.0, fused=True)
    for step in range(30):
        gradient.copy_(torch.randn(3, 50, generator=generator, dtype=dtype))
        judge.param_groups[0]["lr"] = lr = 0.1 / (1 + step)
        ours.step(lr)
        judge.step()
        assert torch.equal(flat, theirs.detach())
    for key, value in ours.state.items():
        assert torch.equal(value, judge.state[theirs][key])
