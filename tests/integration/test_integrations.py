"""The callbacks in real trainers: what they count, what they record, and what is left after a failure."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import icl_mechinterp as icl
from icl_mechinterp import integrations
from icl_mechinterp.errors import ModelError
from icl_mechinterp.integrations import HuggingFaceCallback, LightningCallback
from icl_mechinterp.models import hooked_prediction
from tests.helpers_session import hook_count

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)
pytestmark = pytest.mark.filterwarnings("ignore")  # the trainers' own; a session's are in its notes
OPTIONS: dict[str, Any] = {"every": 2, "final_prompts": 200}


def _data(batches: int) -> icl.Batch:
    return TASK.sample(8 * batches, generator=torch.Generator().manual_seed(0))


def test_the_callbacks_import_no_trainer() -> None:
    for file in Path(integrations.__file__).parent.glob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        absolute = [node for node in nodes if not getattr(node, "level", 0)]
        names = {getattr(node, "module", None) or alias.name for node in absolute for alias in node.names}
        assert not {name.split(".")[0] for name in names} & {"lightning", "pytorch_lightning", "transformers"}, file


@pytest.mark.parametrize("kind", [LightningCallback, HuggingFaceCallback])
def test_hooks_that_we_do_not_know_do_nothing(kind: type) -> None:
    callback = kind(TASK)
    assert callback.on_something_new(1, key=2) is None
    with pytest.raises(AttributeError, match="no attribute 'learn'"):
        callback.learn  # noqa: B018
    callback.close()  # before any training


# --- Lightning --------------------------------------------------------------------------------------------------------


def _lightning_fit(
    callback: LightningCallback, tmp_path: Path, *, batches: int, fail_at: int | None = None, **options: Any
):
    lightning = pytest.importorskip("lightning")

    class Regression(lightning.LightningModule):
        def __init__(self, optimisers: int) -> None:
            super().__init__()
            self.transformer = icl.attention_only(TASK, 2)
            self.losses: list[float] = []
            self.automatic_optimization, self.optimisers = optimisers == 1, optimisers

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == fail_at:
                raise ValueError("in the middle of training")
            z, target = batch
            loss = (hooked_prediction(self.transformer, z) - target).square().mean()
            self.losses.append(float(loss.detach()))
            if self.automatic_optimization:
                return {"loss": loss}
            self.manual_backward(loss)
            for optimiser in self.optimizers():
                optimiser.step()
                optimiser.zero_grad()
            return loss

        def configure_optimizers(self) -> Any:
            parameters = [p for p in self.parameters() if p.requires_grad]
            groups = [parameters[i :: self.optimisers] for i in range(self.optimisers)]
            return [torch.optim.SGD(group, lr=0.01) for group in groups]

    module = Regression(options.pop("optimisers", 1))
    trainer = lightning.Trainer(
        max_epochs=1, callbacks=[callback], accelerator="cpu", logger=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, **{"enable_checkpointing": False, **options},
    )  # fmt: skip
    hooks = hook_count(module)
    try:
        trainer.fit(module, DataLoader(TensorDataset(*_data(batches)), batch_size=8))
    finally:
        assert hook_count(module) == hooks
    return module


def test_lightning_counts_optimiser_steps_and_averages_the_loss(tmp_path: Path) -> None:
    callback = LightningCallback(TASK, **OPTIONS)
    module = _lightning_fit(callback, tmp_path, batches=9, accumulate_grad_batches=2, enable_checkpointing=True)
    assert callback.session is not None
    assert callback.session.notes == []
    run = callback.session.run
    assert run.metrics.step.values.tolist() == [0, 2, 4, 5]
    losses = module.losses
    means = [sum(losses[:4]) / 4, sum(losses[4:8]) / 4]
    assert run.metrics.loss.values[0, 1:3].tolist() == pytest.approx(means, rel=1e-5)
    report = callback.session.report
    assert report is not None
    assert report["equivalence"]["loss"].value is not None


def test_lightning_with_several_optimisers_counts_the_batch_once(tmp_path: Path) -> None:
    callback = LightningCallback(TASK, **OPTIONS)
    _lightning_fit(callback, tmp_path, batches=4, optimisers=2)
    assert callback.session is not None
    assert callback.session.run.metrics.step.values.tolist() == [0, 2, 4]


def test_lightning_in_mixed_precision(tmp_path: Path) -> None:
    callback = LightningCallback(TASK, **OPTIONS)
    _lightning_fit(callback, tmp_path, batches=4, precision="bf16-mixed")
    assert callback.session is not None
    assert callback.session.notes == []


def test_lightning_closes_the_session_when_training_fails(tmp_path: Path) -> None:
    callback = LightningCallback(TASK, out=tmp_path / "run", **OPTIONS)
    with pytest.raises(ValueError, match="in the middle"):
        _lightning_fit(callback, tmp_path, batches=6, fail_at=5)
    run = icl.load_run(tmp_path / "run")
    assert run.metrics.step.values.tolist() == [0, 2, 4]
    assert run.config["notes"] == ["ended by ValueError after step 5: no final probe"]


def test_a_module_without_a_model_is_told(tmp_path: Path) -> None:
    callback = LightningCallback(TASK, **OPTIONS)
    with pytest.raises(ModelError, match="Linear holds 0 HookedTransformers, and one is needed"):
        callback._begin(torch.nn.Linear(2, 2), start=0, steps=None)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


class Regression(torch.nn.Module):
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.transformer = icl.attention_only(TASK, 2)
        self.losses: list[float] = []
        self.fail_at = fail_at

    def forward(self, z: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(self.losses) == self.fail_at:
            raise ValueError("in the middle of training")
        prediction = hooked_prediction(self.transformer, z)
        loss = (prediction - labels).square().mean()
        self.losses.append(float(loss.detach()))
        return {"loss": loss, "logits": prediction}


def _train(model: Regression, callback: HuggingFaceCallback, tmp_path: Path, *, steps: int, **options: Any) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    z, target = _data(2 * steps)
    dataset = [{"z": prompt, "labels": label} for prompt, label in zip(z, target, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"), max_steps=steps, per_device_train_batch_size=8, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1, **options,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=dataset, callbacks=[callback]).train()


def test_huggingface_counts_optimiser_steps(tmp_path: Path) -> None:
    model, callback = Regression(), HuggingFaceCallback(TASK, **OPTIONS)
    hooks = hook_count(model)
    _train(model, callback, tmp_path, steps=5, gradient_accumulation_steps=2)
    assert callback.session is not None
    assert callback.session.notes == []
    assert callback.session.run.metrics.step.values.tolist() == [0, 2, 4, 5]
    assert len(model.losses) >= 10
    assert hook_count(model) == hooks
    report = callback.session.report
    assert report is not None
    assert report["equivalence"]["loss"].value is not None


def test_huggingface_records_the_logged_loss_with_the_next_capture(tmp_path: Path) -> None:
    model, callback = Regression(), HuggingFaceCallback(TASK, **OPTIONS)
    _train(model, callback, tmp_path, steps=4)
    assert callback.session is not None
    losses = callback.session.run.metrics.loss.values[0]
    # the log of step 2 comes after its capture; only the log of step 1 is in the first window
    assert losses[1] == pytest.approx(model.losses[0], rel=1e-3)
    assert losses[2] == pytest.approx(sum(model.losses[1:3]) / 2, rel=1e-3)


def test_huggingface_has_written_what_was_captured_when_training_fails(tmp_path: Path) -> None:
    callback = HuggingFaceCallback(TASK, out=tmp_path / "run", **OPTIONS)
    model = Regression(fail_at=5)
    with pytest.raises(ValueError, match="in the middle"):
        _train(model, callback, tmp_path, steps=8)
    assert icl.load_run(tmp_path / "run").metrics.step.values.tolist() == [0, 2, 4]
    callback.close()
    with icl.attach(model.transformer, TASK, **OPTIONS):
        pass
