import math

import numpy as np
import pytest
import torch

from icl_mechinterp import ConfigError, LinearRegression
from icl_mechinterp.tasks import task_from_dict
from tests.helpers import assert_close, within_stderr

TOEPLITZ = [[0.5 ** abs(i - j) for j in range(3)] for i in range(3)]


def test_layout(generator: torch.Generator) -> None:
    batch = LinearRegression(d=3, context=7, noise=0.1).sample(11, generator=generator)
    assert batch.z.shape == (11, 8, 4)
    assert batch.target.shape == (11, 1)
    assert bool((batch.z[:, -1, 3] == 0).all()), "the query's label slot must be empty"
    assert bool((batch.z[:, :-1, 3] != 0).all())


def test_without_noise_the_target_is_the_linear_function_of_the_context(generator: torch.Generator) -> None:
    z, target = LinearRegression(d=3, context=9, noise=0.0).sample(20, generator=generator, dtype=torch.float64)
    x, y, query = z[:, :-1, :3], z[:, :-1, 3:], z[:, -1, :3]
    beta = torch.linalg.lstsq(x, y).solution[..., 0]
    assert_close((beta * query).sum(1, keepdim=True), target, rtol=1e-9)


@pytest.mark.parametrize(("covariance", "scale"), [(None, 1.0), (TOEPLITZ, 2.0)], ids=["isotropic", "toeplitz"])
def test_moments(generator: torch.Generator, covariance: list | None, scale: float) -> None:
    task = LinearRegression(d=3, context=4, noise=0.3, covariance=covariance, coefficient_scale=scale)
    z, _ = task.sample(50_000, generator=generator, dtype=torch.float64)
    x, y = z[:, 0, :3], z[:, 0, 3]
    sigma = np.eye(3) if covariance is None else np.array(covariance)
    for i in range(3):
        for j in range(3):
            products = x[:, i] * x[:, j]
            within_stderr(products.mean().item(), sigma[i, j], products.std().item() / math.sqrt(len(x)), sigmas=5)
    # E y^2 = c^2 tr(Sigma) / d + sigma^2
    within_stderr(
        y.square().mean().item(),
        scale**2 * np.trace(sigma) / 3 + 0.3,
        y.square().std().item() / math.sqrt(len(y)),
        sigmas=5,
    )


def test_same_generator_same_prompts() -> None:
    task = LinearRegression(d=2, context=3, noise=0.1)
    first, second = (task.sample(5, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first.z, second.z)
    assert torch.equal(first.target, second.target)
    other = task.sample(5, generator=torch.Generator().manual_seed(8))
    assert not torch.equal(first.z, other.z)


def test_the_global_random_state_is_untouched(generator: torch.Generator) -> None:
    before = torch.get_rng_state()
    LinearRegression(d=2, context=3, noise=0.1).sample(5, generator=generator)
    assert torch.equal(before, torch.get_rng_state())


def test_dict_round_trip() -> None:
    task = LinearRegression(d=3, context=4, noise=0.3, covariance=TOEPLITZ, coefficient_scale=2.0)
    assert task_from_dict(task.to_dict()) == task
    assert hash(task) == hash(task_from_dict(task.to_dict()))


@pytest.mark.parametrize(
    ("arguments", "field", "parts"),
    [
        ({"d": 0}, "d", ["at least 1", "got 0"]),
        ({"d": 2.5}, "d", ["whole number", "2.5"]),
        ({"context": 0}, "context", ["at least 1", "context tokens"]),
        ({"noise": -0.1}, "noise", ["at least 0", "-0.1", "variance"]),
        ({"noise": float("nan")}, "noise", ["nan"]),
        ({"noise": "much"}, "noise", ["'much'"]),
        ({"coefficient_scale": 0}, "coefficient_scale", ["positive", "got 0"]),
        ({"covariance": [[1.0, 0.0]]}, "covariance", ["square", "(1, 2)"]),
        ({"covariance": np.eye(2)}, "covariance", ["3 x 3", "2 x 2"]),
        ({"covariance": [[1, 0.5, 0], [0, 1, 0], [0, 0, 1]]}, "covariance", ["symmetric", "0.5"]),
        ({"covariance": -np.eye(3)}, "covariance", ["positive definite", "-1"]),
        ({"covariance": "identity"}, "covariance", ["'identity'"]),
        ({"covariance": np.full((3, 3), np.nan)}, "covariance", ["finite"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_name_the_field_and_the_value(arguments: dict, field: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        LinearRegression(**{"d": 3, "context": 4, "noise": 0.1, **arguments})
    assert caught.value.field == field
    for part in [field, *parts]:
        assert part in str(caught.value)
