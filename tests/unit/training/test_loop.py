"""The loop: steps, callbacks, rates, and what stops it."""

import itertools
import os
import signal
import threading

import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp.training import Every, NonFiniteLoss, Settings, learning_rate, run_loop, start_state
from tests.helpers import assert_close

TASK = icl.LinearRegression(d=3, context=5, noise=0.1)


def _state(settings: Settings, seeds: tuple[int, ...] = (0,)):
    return start_state([icl.attention_only(TASK, 2, seed=seed) for seed in seeds], settings, seeds)


def test_callbacks_fire_at_their_intervals_and_at_the_end() -> None:
    settings = Settings(steps=10, batch=4)
    calls: dict[int, list[int]] = {3: [], 4: []}
    callbacks = [Every(n, lambda state, n=n: calls[n].append(state.step)) for n in calls]
    run_loop(_state(settings), TASK, settings, callbacks)
    assert calls == {3: [3, 6, 9, 10], 4: [4, 8, 10]}


def test_stopping_and_going_on_is_one_run() -> None:
    settings = Settings(steps=12, batch=4, schedule="decay")
    whole, parts = _state(settings), _state(settings)
    run_loop(whole, TASK, settings, [])
    for until in (5, 6, 12):
        run_loop(parts, TASK, settings, [], until=until)
    assert torch.equal(whole.stack.flat, parts.stack.flat)
    assert torch.equal(whole.generator_states, parts.generator_states)
    assert torch.equal(whole.take_window(), parts.take_window())


def test_the_window_is_the_mean_loss_since_the_last_look() -> None:
    settings = Settings(steps=6, batch=4)
    state, losses = _state(settings), []
    for until in range(1, 7):
        run_loop(state, TASK, settings, [], until=until)
        losses.append(state.take_window())
    assert bool(state.take_window().isnan().all()), "nothing happened since"
    fresh = _state(settings)
    run_loop(fresh, TASK, settings, [])
    assert_close(fresh.take_window(), torch.stack(losses).mean(0))


def test_a_loss_that_is_no_number_stops_before_the_step() -> None:
    settings = Settings(steps=5, batch=4)
    state = _state(settings, (0, 1))
    run_loop(state, TASK, settings, [], until=2)
    state.stack.models[1].blocks[0].attn.W_V.data.fill_(float("inf"))
    good = state.stack.flat.detach()[0].clone()
    with pytest.raises(NonFiniteLoss) as caught:
        run_loop(state, TASK, settings, [])
    assert caught.value.step == 3
    assert caught.value.seeds == (1,)
    assert state.step == 2
    assert torch.equal(state.stack.flat.detach()[0], good), "no step was taken"
    for part in ("step 3", "model 1", "lower lr", "checkpoint"):
        assert part in str(caught.value)


def test_ctrl_c_is_answered_between_two_steps() -> None:
    settings = Settings(steps=1000, batch=4)
    state = _state(settings)
    steps: list[int] = []

    def interrupt(current) -> None:
        steps.append(current.step)
        if current.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_loop(state, TASK, settings, [Every(1, interrupt)])
    assert state.step == steps[-1] <= 4, "the state is that of a finished step"
    assert signal.getsignal(signal.SIGINT) is before


def test_training_off_the_main_thread_works() -> None:
    settings = Settings(steps=3, batch=4)
    state = _state(settings)
    thread = threading.Thread(target=run_loop, args=(state, TASK, settings, []))
    thread.start()
    thread.join()
    assert state.step == 3


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    settings = Settings(steps=1, batch=4, threads=before + 1)
    run_loop(_state(settings), TASK, settings, [Every(1, lambda state: None)])
    assert torch.get_num_threads() == before


def test_rates() -> None:
    assert {learning_rate(s, steps=100, lr=0.1, schedule="constant") for s in range(100)} == {0.1}
    decay = [learning_rate(s, steps=100, lr=0.1, schedule="decay") for s in range(101)]
    assert decay[:71] == pytest.approx([0.1] * 71)
    assert decay[85] == pytest.approx(0.05)
    assert decay[100] == 0
    assert all(later <= earlier for earlier, later in itertools.pairwise(decay))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"batch": 2.0}, "batch"),
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"clip": -1.0}, "clip"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"schedule": "cosine"}, "schedule"),
        ({"engine": "fast"}, "engine"),
    ],
    ids=lambda value: str(value),
)
def test_mistakes(arguments: dict, field: str) -> None:
    with pytest.raises(icl.ConfigError) as caught:
        Settings(**{"steps": 1, **arguments})
    assert caught.value.field == field
    assert repr(arguments[field]) in str(caught.value)
