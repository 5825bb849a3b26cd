"""The training loop: batches in, optimiser steps out, callbacks at their intervals. It knows no probe and no disk."""

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float, UInt8
from transformer_lens import HookedTransformer

from .._types import Checked
from ..errors import ConfigError, TrainingError
from ..models import ParameterStack, hooked_prediction, loss_and_gradients, reason_not_fused
from ..models import _tl as tl
from ..tasks import PromptStream, Task, generator_for
from .optimizer import Optimizer, make_optimizer
from .schedule import SCHEDULES, Schedule, learning_rate

Engine: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes prompts and targets `[stream ...]`, writes the gradients into the stack, returns the loss per seed."""


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        steps: optimiser steps in all.
        optimizer: "adam" (betas .9, .999, eps 1e-8, no weight decay) or "sgd".
        lr: learning rate; the papers' 1e-3.
        schedule: "constant", or "decay" to zero over the last 30 % of the steps.
        clip: largest gradient norm of a seed; `None` does not clip.
        batch: prompts per step and stream.
        engine: "fused" (one-layer models, the query's row only) or "hooked" (the model's own forward pass).
        shared_prompts: all seeds of an ensemble see the prompts of the first one.
        threads: torch threads while training; fixed in the checkpoint, because another number changes the last bits.

    Raises:
        ConfigError: a value that cannot be used; `error.field` names it.
    """

    steps: Checked[int]
    optimizer: Checked[Literal["adam", "sgd"]] = "adam"
    lr: Checked[float] = 1e-3
    schedule: Checked[Schedule] = "constant"
    clip: Checked[float | None] = None
    batch: Checked[int] = 256
    engine: Checked[Literal["fused", "hooked"]] = "fused"
    shared_prompts: bool = False
    threads: Checked[int] = 1

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "threads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}.", field=name)
        for name, value in (("lr", self.lr), ("clip", 1.0 if self.clip is None else self.clip)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a positive number; got {value!r}.", field=name)
        for name, choices in (
            ("optimizer", ("adam", "sgd")),
            ("schedule", SCHEDULES),
            ("engine", ("fused", "hooked")),
        ):
            if getattr(self, name) not in choices:
                options = " or ".join(f"'{choice}'" for choice in choices)
                raise ConfigError(f"{name} must be {options}; got {getattr(self, name)!r}.", field=name)


class NonFiniteLoss(TrainingError):
    """The loss stopped being a number; the parameters are still those of the last finished step.

    Attributes:
        step: the step that could not be taken.
        seeds: positions on the seed axis of the models concerned.
        lr: the learning rate.
        kept: where the last good checkpoint is, in words; said by whoever keeps checkpoints.
    """

    def __init__(self, step: int, seeds: Sequence[int], lr: float, *, kept: str = "No checkpoint was written.") -> None:
        super().__init__(
            f"the loss is not a finite number at step {step} (model {', '.join(map(str, seeds))} of the ensemble, "
            f"learning rate {lr:g}), so training stopped. {kept} Start again with a lower lr, or clip the gradient "
            "(clip: 1.0)."
        )
        self.step, self.seeds, self.lr, self.kept = step, tuple(seeds), lr, kept


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, answered between two steps: the state is whole, and all callbacks of its step were called."""


@dataclass
class TrainState:
    """Everything that the next step depends on; what a checkpoint holds.

    Attributes:
        stack: the models' parameters.
        optimizer: over the stack's flat tensor.
        step: finished steps.
        generator_states: of the prompt streams, after the last finished step.
        window_loss: sum of the training loss per seed since the last capture.
        window_steps: number of steps in that sum.
    """

    stack: ParameterStack
    optimizer: Optimizer
    step: int
    generator_states: UInt8[torch.Tensor, "stream byte"]
    window_loss: Float[torch.Tensor, " seed"]
    window_steps: int = 0

    def take_window(self) -> Float[torch.Tensor, " seed"]:
        """Mean training loss per seed since the last call; NaN before the first step."""
        mean = (
            self.window_loss / self.window_steps if self.window_steps else torch.full_like(self.window_loss, torch.nan)
        )
        self.window_loss, self.window_steps = torch.zeros_like(self.window_loss), 0
        return mean


@dataclass(frozen=True)
class Every:
    """Calls `function(state)` after every `n` steps, and after the last one."""

    n: int
    function: Callable[[TrainState], None]


def start_state(models: Sequence[HookedTransformer], settings: Settings, seeds: Sequence[int]) -> TrainState:
    """The state before the first step."""
    stack = ParameterStack(models)
    streams = seeds[:1] if settings.shared_prompts else seeds
    states = torch.stack([generator_for(seed, "prompts").get_state() for seed in streams])
    optimizer = make_optimizer(settings.optimizer, stack.flat.data, stack.grad)
    return TrainState(stack, optimizer, 0, states, torch.zeros(len(models)))


def run_loop(
    state: TrainState, task: Task, settings: Settings, callbacks: Sequence[Every], *, until: int | None = None
) -> None:
    """Trains from `state.step` to the end, or to `until`.

    Raises:
        NonFiniteLoss: before the step is taken, so the parameters are still good.
        Interrupted: on Ctrl-C, between two steps, so the state is whole.
        KeyboardInterrupt: on a second Ctrl-C, or from a callback, at any instant: the state may be torn.
    """
    generators = []
    for row in state.generator_states:
        generators.append(torch.Generator())
        generators[-1].set_state(row.clone())
    engine = _engine(state.stack, settings)
    last = settings.steps if until is None else min(until, settings.steps)
    with (
        _threads(settings.threads),
        _deferred_interrupt() as interrupted,
        PromptStream(task, settings.batch, generators) as stream,
    ):
        while state.step < last:
            _take_step(state, stream, engine, settings)
            for callback in callbacks:
                if state.step % callback.n == 0 or state.step == settings.steps:
                    callback.function(state)
            if interrupted.is_set():
                raise Interrupted


def _take_step(state: TrainState, stream: PromptStream, engine: Engine, settings: Settings) -> None:
    draw = stream.next()
    loss = engine(draw.z, draw.target)
    if not math.isfinite(loss.sum().item()):
        raise NonFiniteLoss(state.step + 1, torch.nonzero(~loss.isfinite()).flatten().tolist(), settings.lr)
    if settings.clip is not None:
        norm = state.stack.grad.norm(dim=1, keepdim=True)
        state.stack.grad.mul_((settings.clip / norm).clamp(max=1.0).nan_to_num_(1.0))
    state.optimizer.step(learning_rate(state.step, steps=settings.steps, lr=settings.lr, schedule=settings.schedule))
    state.step += 1
    state.generator_states = draw.states
    state.window_loss += loss
    state.window_steps += 1


def _engine(stack: ParameterStack, settings: Settings) -> Engine:
    if settings.engine == "hooked":
        return _hooked_engine(stack)
    reason = next(filter(None, map(reason_not_fused, stack.models)), None)
    if reason is not None:
        raise ConfigError(
            f"the fused engine cannot express this model: {reason}. Train it with engine='hooked'.", field="engine"
        )
    weights, gradients = stack.heads(stack.flat.data), stack.heads(stack.grad)
    scale, read_out = tl.attention_scale(stack.models[0], 0), stack.models[0].unembed.W_U.detach()

    def engine(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_and_gradients(weights, gradients, z, target, scale=scale, read_out=read_out)

    return engine


def _hooked_engine(stack: ParameterStack) -> Engine:
    def engine(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = []
        for seed, model in enumerate(stack.models):
            stream = min(seed, len(z) - 1)
            loss = (hooked_prediction(model, z[stream]) - target[stream]).square().mean()
            names = dict(model.named_parameters())
            gradients = torch.autograd.grad(loss, [names[name] for name in stack.shapes])
            for name, gradient in zip(stack.shapes, gradients, strict=True):
                stack.view(stack.grad, name)[seed].copy_(gradient)
            losses.append(loss.detach())
        return torch.stack(losses)

    return engine


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets an event that the loop reads between steps; a second one interrupts at once.

    Off the main thread Python allows no signal handlers, and the event is never set.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def handler(number: int, frame: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
