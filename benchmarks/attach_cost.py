"""Attached to a user's own loop, captures with weight probes every 500 steps cost under 2 % of it.

python benchmarks/attach_cost.py

The loop is a plain HookedTransformer's: H = 2, B = 256, d = 5, L = 40, Adam, one thread. A capture is one forward pass on
32 prompts, circuits, attention and weight probes; every sixteenth also appends to the run folder, and its share of that
is counted. `session.step` itself runs at every step.
"""

import sys

import torch
from timing import best_times, verdict

import icl_mechinterp as icl
from icl_mechinterp.models import hooked_prediction
from icl_mechinterp.session.folder import _BLOCK
from icl_mechinterp.tasks import generator_for

TASK = icl.LinearRegression(d=5, context=40, noise=0.1)
EVERY = 500  # the default


def main() -> int:
    torch.set_num_threads(1)
    model = icl.attention_only(TASK, 2)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    generator = generator_for(0, "prompts")
    session = icl.attach(model, TASK, every=10**9)
    session.open()
    loss = torch.tensor(0.0)

    def users_step() -> None:
        nonlocal loss
        z, target = TASK.sample(256, generator=generator)
        loss = (hooked_prediction(model, z) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def count() -> None:
        for _ in range(100):
            session.step(loss=loss)

    def block() -> None:
        """As many captures as are written together, their append included."""
        for _ in range(_BLOCK):
            session.step(loss=loss)  # a row of the history needs a step of its own
            session.capture()

    step, counting, capturing = best_times(users_step, count, block, calls=1, rounds=12)
    counting, capturing = counting / 100, capturing / _BLOCK
    print(f"user's step {step * 1e3:.2f} ms, session.step {counting * 1e6:.1f} us, capture {capturing * 1e3:.2f} ms")
    held = verdict(
        "captures every 500 steps, share of the loop", (counting + capturing / EVERY) / step, 0.02, at_least=False
    )
    session.close(RuntimeError("the benchmark needs no final probe"))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
