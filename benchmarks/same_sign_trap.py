"""How often do both heads of a two-head model end with one sign? About a quarter of the seeds; of three heads, hardly ever.

python benchmarks/same_sign_trap.py [SEEDS [STEPS]]

64 seeds at once on shared prompts, 6,000 steps at the papers' constant rate; the verdict of every seed at the end. The
interval is Wilson's 95 %. This is a measurement, not a floor: it always exits 0.
"""

import sys
from collections import Counter

from scipy.stats import binomtest

import icl_mechinterp as icl

TASK = icl.LinearRegression(d=5, context=40, noise=0.1)


def main() -> int:
    seeds, steps = (int(argument) for argument in (sys.argv[1:] + ["64", "6000"][len(sys.argv) - 1 :]))
    for n_heads in (2, 3):
        models = [icl.attention_only(TASK, n_heads, seed=seed) for seed in range(seeds)]
        run = icl.train(models, TASK, steps=steps, shared_prompts=True, every=1000, checkpoint_every=steps)
        reports = run.final_reports
        trapped = [r.seed for r in reports if len({h.label for h in r.heads} - {"dummy"}) == 1]
        low, high = binomtest(len(trapped), seeds).proportion_ci(method="wilson")
        share = f"{len(trapped) / seeds:.2f} [{low:.2f}, {high:.2f}]"
        print(f"H = {n_heads}: {len(trapped)} of {seeds} seeds have heads of one sign: {share}")
        print(f"  seeds {trapped}")
        print(f"  verdicts {dict(Counter(r.algorithm for r in reports))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
