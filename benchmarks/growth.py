"""The fused step grows linearly with the context, with the heads and with the seeds of an ensemble, not faster.

python benchmarks/growth.py

The figure is the slope of log time against log size between a middling and a large size, where overhead no longer hides
the arithmetic; 1 is linear, less is better.
"""

import math
import sys

import torch
from timing import best_times, verdict

import icl_mechinterp as icl
from icl_mechinterp.models import ParameterStack, loss_and_gradients
from icl_mechinterp.models import _tl as tl
from icl_mechinterp.tasks import generator_for

SIZES = {"context": (100, 400), "heads": (8, 32), "seeds, shared prompts": (8, 32), "seeds, own prompts": (4, 16)}


def step(context: int = 40, n_heads: int = 2, seeds: int = 1, shared: bool = True):
    task = icl.LinearRegression(d=5, context=context, noise=0.1)
    models = [icl.attention_only(task, n_heads, seed=seed) for seed in range(seeds)]
    stack = ParameterStack(models)
    streams = 1 if shared else seeds
    batches = [task.sample(256, generator=generator_for(seed, "prompts")) for seed in range(streams)]
    z, target = torch.stack([b.z for b in batches]), torch.stack([b.target for b in batches])
    weights, gradients = stack.heads(stack.flat.data), stack.heads(stack.grad)
    scale, read_out = tl.attention_scale(models[0], 0), models[0].unembed.W_U.detach()
    return lambda: loss_and_gradients(weights, gradients, z, target, scale=scale, read_out=read_out)


def main() -> int:
    torch.set_num_threads(1)
    held = []
    for name, (small, large) in SIZES.items():
        keywords = [
            {
                "context": {"context": size},
                "heads": {"n_heads": size},
                "seeds, shared prompts": {"seeds": size},
                "seeds, own prompts": {"seeds": size, "shared": False},
            }[name]
            for size in (small, large)
        ]
        before, after = best_times(*(step(**keyword) for keyword in keywords), calls=5)
        slope = math.log(after / before) / math.log(large / small)
        print(f"{name} {small} -> {large}: {before * 1e3:.2f} ms -> {after * 1e3:.2f} ms")
        held.append(verdict(f"slope in {name}", slope, 1.15, at_least=False))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
