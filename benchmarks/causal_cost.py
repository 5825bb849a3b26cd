"""A whole report takes less than 30 s and 600 MB; its ablation and patching cost less than 40 hooked forward passes.

python benchmarks/causal_cost.py

H = 4, d = 5, L = 40, 2,000 prompts, one thread, float64, both probes with every table in their detail: about 200 ablated
and patched runs of model and idealised heads, of which each would be one hooked forward pass. Times are given in those
passes, taken in turns, because machines are noisy; from H = 4 to 8 they grow no faster than the heads.
"""

import resource
import sys
import time

import torch
from timing import best_times, verdict

import icl_mechinterp as icl
from icl_mechinterp.models import hooked_prediction
from icl_mechinterp.probes import classify
from icl_mechinterp.probes.ablation import ablation
from icl_mechinterp.probes.patching import patching
from icl_mechinterp.probes.row import Row

TASK = icl.LinearRegression(d=5, context=40, noise=0.1)


def cost(n_heads: int) -> tuple[float, float]:
    """Seconds of both probes, and the same in hooked forward passes."""
    model = icl.attention_only(TASK, n_heads)
    found = icl.circuits(model, TASK)
    heads = classify(found)
    parts = TASK.sample(2000, generator=torch.Generator().manual_seed(0)).z.split(250)

    def forward() -> None:
        with torch.no_grad():
            for part in parts:
                hooked_prediction(model, part)

    ablating, patched, passing = best_times(
        lambda: ablation(Row.of(found), heads, TASK), lambda: patching(Row.of(found), heads, TASK), forward,
        calls=1, rounds=6,
    )  # fmt: skip
    print(f"H = {n_heads}: ablation {ablating:.2f} s, patching {patched:.2f} s, a hooked forward pass {passing:.3f} s")
    return ablating + patched, (ablating + patched) / passing


def whole_report() -> tuple[float, float]:
    """Seconds and MB above the imports of every probe, H = 4; untrained, so that nothing is undecided for long."""
    model = icl.attention_only(TASK, 4)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    icl.probe(model, TASK)
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return elapsed, (after - before) / 1024


def main() -> int:
    torch.set_num_threads(1)
    elapsed, megabytes = whole_report()
    (four, passes), (eight, _) = cost(4), cost(8)
    held = [
        verdict("every probe at H = 4, seconds", elapsed, 30, at_least=False),
        verdict("its memory above the imports, MB", megabytes, 600, at_least=False),
        verdict("both probes at H = 4, in hooked forward passes", passes, 40, at_least=False),
        verdict("H = 8 over H = 4", eight / four, 3, at_least=False),
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
