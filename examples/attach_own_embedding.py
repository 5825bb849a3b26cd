"""Attaches probes to a model with its own embedding: read-in and read-out as matrices, and learned by regression.

    python examples/attach_own_embedding.py [STEPS]

Circuits are reported in task coordinates either way. The embedding trains along: the views `embedding.weight.T` and
`W_U` stay up to date, and a fitted embedding is fitted anew at every capture.
"""

import sys
import warnings

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

import icl_mechinterp as icl
from icl_mechinterp.models import query_mask

TASK = icl.LinearRegression(d=3, context=20, noise=0.1)
WIDTH = 16


class Regressor(torch.nn.Module):
    """A transformer between an embedding of its own and its unembedding."""

    def __init__(self, *, positions: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Linear(TASK.d + 1, WIDTH, bias=positions)
        self.positions = torch.nn.Parameter(0.1 * torch.randn(TASK.context + 1, WIDTH)) if positions else None
        config = HookedTransformerConfig(
            n_layers=1, n_heads=2, d_model=WIDTH, d_head=WIDTH, n_ctx=TASK.context + 1, d_vocab=1, d_vocab_out=1,
            attn_only=True, normalization_type=None, seed=0, device="cpu",
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.transformer = HookedTransformer(config)

    def embed(self, z: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(z)
        return embedded if self.positions is None else embedded + self.positions[: z.shape[1]]

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.transformer(self.embed(z), start_at_layer=0, attention_mask=query_mask(z))[:, -1]


def coordinates_of(model: Regressor) -> icl.Coordinates:
    """Matrices where the embedding is one; else a regression on prompts, with what it leaves unexplained."""
    if model.positions is None:
        return icl.Coordinates(read_in=model.embedding.weight.T, read_out=model.transformer.unembed.W_U)
    return icl.fit_coordinates(model.transformer, TASK, embed=model.embed)


def train(model: Regressor, steps: int, *, every: int = 200, final_prompts: int = 2_000) -> icl.Session:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    coordinates = coordinates_of(model)
    with icl.attach(
        model.transformer, TASK, every=every, coordinates=coordinates, final_prompts=final_prompts
    ) as session:
        for _ in range(steps):
            z, target = TASK.sample(128, generator=generator)
            loss = (model(z) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.step(loss=loss)
    return session


def main() -> None:
    for positions in (False, True):
        session = train(Regressor(positions=positions), int(sys.argv[1]) if len(sys.argv) > 1 else 1_000)
        print(f"\nwith a bias and positions: {positions}")
        print(f"circuits in task coordinates: {session.run.circuits.kq.dims} {session.run.circuits.kq.shape}")
        print(session.report.verdict if session.report else "no report")


if __name__ == "__main__":
    main()
