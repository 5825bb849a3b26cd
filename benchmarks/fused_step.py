"""The fused step is 15x the plain HookedTransformer loop, and 4x / 6x a textbook PyTorch loop (H = 2 / 4).

python benchmarks/fused_step.py

One thread, one process; B = 256, d = 5, L = 40; every step draws its prompts. The textbook loop is nn.Linear q on the
query, k and v on the context, o on the concatenated heads, all of full width, and torch.optim.Adam as it comes. The
second figure of the fused loop has its prompts drawn by a second thread, as training does where there is a second core.
"""

import sys

import torch
from timing import best_times, verdict

import icl_mechinterp as icl
from icl_mechinterp.models import hooked_prediction
from icl_mechinterp.tasks import PromptStream, generator_for
from icl_mechinterp.training import Settings, start_state
from icl_mechinterp.training.loop import _engine, _take_step

BATCH, CALLS = 256, 40
TASK = icl.LinearRegression(d=5, context=40, noise=0.1)


class Textbook(torch.nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.width = n_heads, width
        self.q, self.k, self.v = (torch.nn.Linear(width, n_heads * width, bias=False) for _ in range(3))
        self.o = torch.nn.Linear(n_heads * width, 1, bias=False)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        context, query = z[:, :-1], z[:, -1:]
        q, k, v = (
            f(x).unflatten(-1, (self.n_heads, self.width)).transpose(1, 2)
            for f, x in ((self.q, query), (self.k, context), (self.v, context))
        )
        pattern = torch.softmax(q @ k.mT / self.width**0.5, dim=-1)
        return self.o((pattern @ v).transpose(1, 2).flatten(1))


def plain_loop(predict, parameters):
    """A step as anybody writes it."""
    optimizer, generator = torch.optim.Adam(parameters, lr=1e-3), generator_for(0, "prompts")

    def step() -> None:
        z, target = TASK.sample(BATCH, generator=generator)
        loss = (predict(z) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def fused_loop(model, stream):
    settings = Settings(steps=10**9, batch=BATCH)
    state = start_state([model], settings, [0])
    engine = _engine(state.stack, settings)
    return lambda: _take_step(state, stream, engine, settings)


def main() -> int:
    torch.set_num_threads(1)
    held = []
    for n_heads, textbook_floor in ((2, 4.0), (4, 6.0)):
        hooked = icl.attention_only(TASK, n_heads)
        book = Textbook(TASK.d + 1, n_heads)
        with (
            PromptStream(TASK, BATCH, [generator_for(0, "prompts")], ahead=False) as inline,
            PromptStream(TASK, BATCH, [generator_for(0, "prompts")], ahead=True) as ahead,
        ):
            slow, textbook, fused, threaded = best_times(
                plain_loop(
                    lambda z, m=hooked: hooked_prediction(m, z), [p for p in hooked.parameters() if p.requires_grad]
                ),
                plain_loop(book, book.parameters()),
                fused_loop(icl.attention_only(TASK, n_heads), inline),
                fused_loop(icl.attention_only(TASK, n_heads), ahead),
                calls=CALLS,
            )
        times = f"hooked {slow * 1e3:.2f} ms, textbook {textbook * 1e3:.2f} ms, fused {fused * 1e3:.3f} ms"
        print(f"H = {n_heads}: {times}, fused with prompts drawn ahead {threaded * 1e3:.3f} ms")
        if n_heads == 2:
            held.append(verdict("hooked / fused", slow / fused, 15.0, at_least=True))
        held.append(verdict(f"textbook / fused, H = {n_heads}", textbook / fused, textbook_floor, at_least=True))
        print(f"     with prompts drawn ahead: hooked {slow / threaded:.1f}x, textbook {textbook / threaded:.1f}x")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
