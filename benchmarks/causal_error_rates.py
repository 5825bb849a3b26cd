"""Claim: on clean models with the noise that training leaves, causal measurements fail in 2 % or fewer.

    OMP_NUM_THREADS=1 python benchmarks/causal_error_rates.py [MODELS]          (about two minutes for 60)

1. False alarms: every required causal measurement on clean planted models with noise, with the median, the 95 % point and
   the extreme of its values.
2. Detection: a pair that does not debias (heads of one sign; sums on one side; a constant bias is the zoo's), a head that is
   bypassed, structure violated at twice its threshold.

Exits with 1 when a rate at the two lower noise levels is above 2 % and its interval excludes it.
"""

import sys
from collections import defaultdict

import numpy as np
import torch
from scipy.stats import binomtest
from taxonomy_error_rates import NOISE, Planted, plant, rate, violations, with_noise

from icl_mechinterp.probes import ablation, classify, interchange, patching
from icl_mechinterp.probes.interchange import row_level
from icl_mechinterp.probes.row import Row
from icl_mechinterp.results import Measurement

torch.set_num_threads(1)

TOLERATED, PROMPTS = 0.02, 5_000
GAMMA = 0.13


def causal(planted: Planted, seed: int = 0) -> dict[str, Measurement]:
    heads, row = classify(planted.circuits), Row.of(planted.circuits)
    results = (
        ablation(row, heads, planted.task, seed=seed),
        patching(row, heads, planted.task, seed=seed),
        interchange(row_level(row), heads, planted.task, prompts=PROMPTS, seed=seed),
    )
    return {m.name: m for result in results for m in result.measurements if m.required}


def main() -> int:
    models = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    rng, held = np.random.default_rng(20_261_207), True
    for level, noise in NOISE.items():
        failed, undecided, values = defaultdict(int), defaultdict(int), defaultdict(list)
        for seed in range(models):
            for name, m in causal(plant(rng, noise, clean=True), seed).items():
                failed[name] += m.passed is False
                undecided[name] += m.passed is None
                values[name].append(np.nan if m.value is None else m.value * (1 if m.rule == "<" else -1))
        print(f"1. False alarms, {level}: {models} clean models")
        for name, found in values.items():
            middle, high, worst = np.abs(np.nanquantile(found, (0.5, 0.95, 1.0)))
            print(
                f"   {name:30s} {rate(failed[name], models)}, undecided {undecided[name]}; "
                f"median {middle:.3g}, 95 % {high:.3g}, worst {worst:.3g}"
            )
            if not level.startswith("H = 8"):
                held &= binomtest(failed[name], models).proportion_ci(0.95).low <= TOLERATED
    print(
        f"2. What fails at twice the threshold of a structural measurement, gamma = {GAMMA}, d = 5, L = 40, 20 models each"
    )
    for name, make in violations().items():
        failed = defaultdict(int)
        for seed in range(20):
            for other, m in causal(with_noise(rng, make(rng), NOISE["constant rate"], GAMMA), seed).items():
                failed[other] += m.passed is False
        print(f"   {name:22s} {', '.join(f'{other} {count}' for other, count in failed.items() if count) or 'none'}")
    print("ok" if held else "FAILED")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
