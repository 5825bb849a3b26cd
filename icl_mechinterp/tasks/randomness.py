"""Which generator draws what.

Every use of randomness has its own stream, derived from a seed and a purpose, so that seed k of an ensemble sees the
prompts that a single run with seed k sees, and no two seeds or purposes share a stream.
"""

from typing import Literal, TypeAlias, get_args

import numpy as np
import torch

Purpose: TypeAlias = Literal["prompts", "evaluation", "probe", "fit"]
"""Training prompts; the fixed prompts of captures; the prompts of a probe; other prompts on which a probe fits."""


def generator_for(seed: int, purpose: Purpose) -> torch.Generator:
    """A fresh generator for one purpose of one seed."""
    entropy = [seed, get_args(Purpose).index(purpose)]
    return torch.Generator().manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
