"""Importing icl_mechinterp costs under half a second beyond TransformerLens itself; what every public name costs is shown.

python benchmarks/import_time.py
"""

import subprocess
import sys

from timing import verdict

CODE = """
import time
import transformer_lens, torch
start = time.perf_counter()
import icl_mechinterp as icl
bare = time.perf_counter() - start
for name in icl.__all__:
    getattr(icl, name)
print(bare, time.perf_counter() - start)
"""


def main() -> int:
    runs = [subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True) for _ in range(3)]
    bare, everything = (min(float(run.stdout.split()[i]) for run in runs) for i in (0, 1))
    print(f"import icl_mechinterp {bare * 1e3:.1f} ms; with every public name {everything * 1e3:.0f} ms")
    return 0 if verdict("seconds beyond transformer_lens", bare, 0.5, at_least=False) else 1


if __name__ == "__main__":
    sys.exit(main())
