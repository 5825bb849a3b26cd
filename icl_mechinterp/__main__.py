"""`python -m icl_mechinterp` is `icl-mechinterp`."""

from .cli import main

main()
