"""Interleaved timing: machines are noisy, so figures are ratios of minima taken in turns in one process."""

import time
from collections.abc import Callable


def best_times(*functions: Callable[[], object], calls: int, rounds: int = 12) -> list[float]:
    """Seconds per call of each function: the best of many short rounds, in turns."""
    for function in functions:
        function()
    best = [float("inf")] * len(functions)
    for _ in range(rounds):
        for index, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[index] = min(best[index], (time.perf_counter() - start) / calls)
    return best


def verdict(name: str, value: float, bound: float, *, at_least: bool) -> bool:
    """Prints one line and says whether the floor holds."""
    held = value >= bound if at_least else value <= bound
    sign = ">=" if at_least else "<="
    print(f"{'ok  ' if held else 'FAIL'} {name}: {value:.3g} (needs {sign} {bound:g})")
    return held
