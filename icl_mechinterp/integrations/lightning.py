"""A callback for `lightning.Trainer(callbacks=[...])`.

A step of the session is a batch in which Lightning's `global_step` moved, so an accumulated gradient is one step, and so
is a batch in which several optimisers stepped. In distributed training the first process observes.
"""

from collections.abc import Mapping
from typing import Any

from ._callback import SessionCallback


class LightningCallback(SessionCallback):
    """Attaches a session to a `LightningModule` that holds a `HookedTransformer`.

    The loss is what `training_step` returns, itself or under "loss".

    Args:
        task, model, options: as `SessionCallback`; `options` are those of `icl_mechinterp.attach`.

    Raises:
        UserError: when training begins, what `attach` raises.
    """

    _global_step = 0

    @property
    def state_key(self) -> str:
        """Lightning keeps one state per key in its checkpoints; ours is empty."""
        return f"{type(self).__qualname__}-{id(self)}"

    _legacy_state_key = state_key

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        del trainer, pl_module, stage

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        del state_dict

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Opens the session; the model is on its device by now."""
        self._global_step = trainer.global_step
        if trainer.is_global_zero:
            total = trainer.estimated_stepping_batches
            self._begin(pl_module, start=trainer.global_step, steps=int(total) if total < float("inf") else None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts a step when an optimiser stepped."""
        del pl_module, batch, batch_idx
        if self.session is None or not trainer.is_global_zero:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            # Lightning hands over the loss divided by the number of accumulated batches
            self.session.observe(loss * trainer.accumulate_grad_batches)
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self.session.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the session with its final probe."""
        del trainer, pl_module
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Closes the session; what was captured is written."""
        del trainer, pl_module
        self.close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        del trainer, pl_module, stage
        self.close()
