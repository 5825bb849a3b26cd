"""Attaches probes to a Hugging Face Trainer by a callback.

pip install 'icl-mechinterp[integrations]'
python examples/attach_huggingface.py [STEPS] [OUT]
"""

import sys
import tempfile

import torch
from transformers import Trainer, TrainingArguments

import icl_mechinterp as icl
from icl_mechinterp.integrations import HuggingFaceCallback
from icl_mechinterp.models import hooked_prediction

TASK = icl.LinearRegression(d=3, context=20, noise=0.1)


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = icl.attention_only(TASK, n_heads=2, seed=0)

    def forward(self, z: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        prediction = hooked_prediction(self.transformer, z)
        return {"loss": (prediction - labels).square().mean(), "logits": prediction}


def train(steps: int, out: str | None = None, *, every: int = 200, final_prompts: int = 5_000) -> icl.Session:
    z, target = TASK.sample(min(50_000, 128 * steps), generator=torch.Generator().manual_seed(0))
    dataset = [{"z": prompt, "labels": label} for prompt, label in zip(z, target, strict=True)]
    callback = HuggingFaceCallback(TASK, every=every, out=out, final_prompts=final_prompts)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=128, learning_rate=3e-3, use_cpu=True,
            logging_steps=max(1, every // 2), save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        Trainer(Regression(), arguments, train_dataset=dataset, callbacks=[callback]).train()
    assert callback.session is not None
    return callback.session


def main() -> None:
    session = train(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000, sys.argv[2] if len(sys.argv) > 2 else None)
    print(session.run.metrics.loss[0].values)
    print(session.report.verdict if session.report else "no report")


if __name__ == "__main__":
    main()
