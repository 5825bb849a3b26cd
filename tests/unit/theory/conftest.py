"""Prompts of the isotropic task, drawn here from its definition so that the theory is tested against nothing of ours."""

from typing import Protocol

import pytest
import torch


class Sampler(Protocol):
    def __call__(
        self, batch: int, d: int, L: int, noise: float, *, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@pytest.fixture(scope="session")
def sample_prompts() -> Sampler:
    """z `[batch L+1 d+1]` and the query's noisy labels `[batch]`, float64."""

    def sample(batch: int, d: int, L: int, noise: float, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, L + 1, d, generator=generator, dtype=torch.float64)
        beta = torch.randn(batch, d, generator=generator, dtype=torch.float64) / d**0.5
        y = torch.einsum("bld,bd->bl", x, beta)
        y = y + noise**0.5 * torch.randn(batch, L + 1, generator=generator, dtype=torch.float64)
        target = y[:, -1].clone()
        y[:, -1] = 0
        return torch.cat([x, y[..., None]], -1), target

    return sample
