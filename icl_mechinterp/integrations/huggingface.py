"""A callback for `transformers.Trainer(callbacks=[...])`.

The Trainer tells a callback of finished optimiser steps, so an accumulated gradient is one step. It hands the loss over
only when it logs, as a mean over `logging_steps`, after the step's own callback: such a mean counts for the next capture.
It does not say when a training fails. So everything is written at every capture, and a session that was left open is
closed when the next training begins, or by `close()`.
"""

from typing import Any

from ._callback import SessionCallback


class HuggingFaceCallback(SessionCallback):
    """Attaches a session to a model that holds a `HookedTransformer`.

    Args:
        task, model, options: as `SessionCallback`; `options` are those of `icl_mechinterp.attach`.

    Raises:
        UserError: when training begins, what `attach` raises.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Opens the session; the model is on its device by now."""
        del args, control, kwargs
        if state.is_world_process_zero:
            self._begin(model, start=state.global_step, steps=state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts a step."""
        del args, control, kwargs
        if self.session is not None and state.is_world_process_zero:
            before = self.session.report
            self.session.step()
            if self.session.report is not before:
                self.session.flush()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Takes the mean loss since the last log."""
        del args, control, kwargs
        if self.session is not None and self.session.is_open and state.is_world_process_zero and "loss" in (logs or {}):
            self.session.observe(float(logs["loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the session with its final probe."""
        del args, state, control, kwargs
        self.close()
