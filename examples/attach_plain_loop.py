"""Attaches probes to a plain PyTorch loop and prints what the model became.

    python examples/attach_plain_loop.py [STEPS] [OUT]

The loop is yours; three lines are new: `with icl.attach(...)`, `session.step(...)`, and whatever you do with the run.
"""

import sys

import torch

import icl_mechinterp as icl
from icl_mechinterp.models import query_mask

TASK = icl.LinearRegression(d=5, context=40, noise=0.1)


def train(steps: int, out: str | None = None, *, every: int = 500, final_prompts: int = 20_000) -> icl.Session:
    model = icl.attention_only(TASK, n_heads=2, seed=0)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    with icl.attach(model, TASK, every=every, out=out, final_prompts=final_prompts) as session:
        for _ in range(steps):
            z, target = TASK.sample(256, generator=generator)
            loss = (model(z, start_at_layer=0, attention_mask=query_mask(z))[:, -1] - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.step(loss=loss)
    return session


def main() -> None:
    session = train(int(sys.argv[1]) if len(sys.argv) > 1 else 3_000, sys.argv[2] if len(sys.argv) > 2 else None)
    metrics = session.run.metrics
    for step, loss, omega in zip(
        metrics.step.values, metrics.loss[0].values, metrics.omega[0, :, 0].values, strict=True
    ):
        print(f"step {step:6}  loss {loss:.4f}  omega of each head {omega}")
    print(session.report.verdict if session.report else "no report")


if __name__ == "__main__":
    main()
