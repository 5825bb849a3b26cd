"""Attaches probes to a Lightning training by a callback.

pip install 'icl-mechinterp[integrations]'
python examples/attach_lightning.py [STEPS] [OUT]
"""

import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import icl_mechinterp as icl
from icl_mechinterp.integrations import LightningCallback
from icl_mechinterp.models import hooked_prediction

TASK = icl.LinearRegression(d=3, context=20, noise=0.1)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = icl.attention_only(TASK, n_heads=2, seed=0)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        z, target = batch
        return (hooked_prediction(self.transformer, z) - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=3e-3)


def train(steps: int, out: str | None = None, *, every: int = 200, final_prompts: int = 5_000) -> icl.Session:
    batch = TASK.sample(min(50_000, 128 * steps), generator=torch.Generator().manual_seed(0))
    callback = LightningCallback(TASK, every=every, out=out, final_prompts=final_prompts)
    trainer = lightning.Trainer(
        max_steps=steps, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(), DataLoader(TensorDataset(*batch), batch_size=128))
    assert callback.session is not None
    return callback.session


def main() -> None:
    session = train(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000, sys.argv[2] if len(sys.argv) > 2 else None)
    print(session.run.metrics.loss[0].values)
    print(session.report.verdict if session.report else "no report")


if __name__ == "__main__":
    main()
