"""Checks shapes at run time (jaxtyping + beartype) for every module of the package, and keeps tests off the network."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], object]:
    """`trained_run("two_head")`: the run of a shipped config, trained once for all tests and workers of a session.

    It is made by the command line in a process of its own, as a user makes it, and without the run-time type checks of
    this session, which would triple the time of a training step.
    """
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if worker_id != "master" else base  # workers share the parent of their own folders

    def train(config: str) -> object:
        import icl_mechinterp as icl

        run: Path = folder / f"trained-{config}"
        with open(folder / f"trained-{config}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (run / "done").exists():
                command = [sys.executable, "-m", "icl_mechinterp", "train", config, "--out", str(run)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
                (run / "done").touch()
        return icl.load_run(run)

    return train
