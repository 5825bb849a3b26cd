"""A one-layer trainer in the style of the papers' published code, written without the package it is compared with.

`nn.Linear` maps of all heads side by side (H*D x D), keys and values from the context, one query row, logits over sqrt(D),
one output row. Prompts are its own too.
"""

import math

import torch
from torch import nn


class PapersModel(nn.Module):
    def __init__(self, width: int, n_heads: int, n_out: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.width, self.n_heads = width, n_heads
        self.q_proj = nn.Linear(width, width * n_heads, bias=bias)
        self.k_proj = nn.Linear(width, width * n_heads, bias=bias)
        self.v_proj = nn.Linear(width, width * n_heads, bias=bias)
        self.o_proj = nn.Linear(width * n_heads, n_out, bias=bias)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Predictions `[batch out]` from prompts `[batch pos token]`; the last position is the query."""
        batch, context, query = len(z), z[:, :-1], z[:, -1:]
        q, k, v = (
            linear(tokens).view(batch, -1, self.n_heads, self.width).transpose(1, 2)
            for linear, tokens in ((self.q_proj, query), (self.k_proj, context), (self.v_proj, context))
        )
        attention = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.width), dim=-1)
        merged = (attention @ v).transpose(1, 2).reshape(batch, self.n_heads * self.width)
        return self.o_proj(merged)[:, -1:] if self.o_proj.out_features == self.width else self.o_proj(merged)


def train_papers_model(steps: int, *, seed: int, n_heads: int = 2, d: int = 5, context: int = 40) -> PapersModel:
    """Adam, batch 256, fresh prompts, noise variance 0.1; the rate decays linearly over the last half."""
    torch.manual_seed(seed)
    model = PapersModel(d + 1, n_heads)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2.0 * (1 - step / steps)))
    for _ in range(steps):
        x, beta = torch.randn(256, context + 1, d), torch.randn(256, d, 1) / math.sqrt(d)
        y = x @ beta + math.sqrt(0.1) * torch.randn(256, context + 1, 1)
        z = torch.cat([x, y], dim=-1)
        z[:, -1, -1] = 0
        loss = (model(z) - y[:, -1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    return model
