"""Checks shapes at run time (jaxtyping + beartype) for every module of the package, and keeps tests off the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

from jaxtyping import install_import_hook

import tests.typechecking  # noqa: F401  # the hook finds the checker by its path

install_import_hook("icl_mechinterp", "tests.typechecking.check")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture
def generator() -> torch.Generator:
    """A fresh generator with a fixed seed; randomness in tests comes from here."""
    return torch.Generator().manual_seed(20_250_312)
