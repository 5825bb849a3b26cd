"""Weight probes every 500 steps cost under 2 % of a run, checkpoint probes under 5 %; the default probe under 10 s.

python benchmarks/probe_cost.py

The run is H = 2, B = 256, d = 5, L = 40, one thread. A capture is circuits, attention, engine check and weight probes;
a checkpoint adds a function check on 2,000 prompts, the appends to the history, and three fsyncs.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from timing import best_times, verdict

import icl_mechinterp as icl
from icl_mechinterp.experiment.recorder import Recorder
from icl_mechinterp.tasks import PromptStream, generator_for
from icl_mechinterp.tracking import NullTracker
from icl_mechinterp.training import Settings, start_state
from icl_mechinterp.training.loop import _engine, _take_step

TASK = icl.LinearRegression(d=5, context=40, noise=0.1)
EVERY, CHECKPOINT_EVERY = 500, 5_000  # the defaults


def main() -> int:
    torch.set_num_threads(1)
    model, settings = icl.attention_only(TASK, 2), Settings(steps=10**9)
    state = start_state([model], settings, [0])
    engine = _engine(state.stack, settings)
    with (
        tempfile.TemporaryDirectory() as folder,
        PromptStream(TASK, settings.batch, [generator_for(0, "prompts")]) as stream,
    ):
        recorder = Recorder(
            Path(folder),
            TASK,
            settings,
            [0],
            [model],
            probes=("structure", "equivalence"),
            tracker=NullTracker(),
            digest="",
        )

        def steps() -> None:
            for _ in range(20):
                _take_step(state, stream, engine, settings)

        def capture() -> None:
            _take_step(state, stream, engine, settings)  # a history row needs a step of its own
            recorder.on_capture(state)

        def checkpoint() -> None:
            _take_step(state, stream, engine, settings)
            recorder.on_checkpoint(state)

        twenty, capturing, checkpointing = best_times(steps, capture, checkpoint, calls=3, rounds=8)
    step = twenty / 20
    print(f"step {step * 1e3:.3f} ms, capture {capturing * 1e3:.2f} ms, checkpoint {checkpointing * 1e3:.1f} ms")
    weights = (capturing - step) / (EVERY * step)
    held = [
        verdict("captures and weight probes, share of the run", weights, 0.02, at_least=False),
        verdict(
            "with checkpoint probes", weights + (checkpointing - step) / (CHECKPOINT_EVERY * step), 0.05, at_least=False
        ),
    ]
    start = time.perf_counter()
    first = icl.probe(model, TASK, seed=3)
    elapsed = time.perf_counter() - start
    held.append(verdict("default probe, seconds", elapsed, 10.0, at_least=False))
    held.append(
        verdict("the same seed gives the same report", first == icl.probe(model, TASK, seed=3), 1, at_least=True)
    )
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
