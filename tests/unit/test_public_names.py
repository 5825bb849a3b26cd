"""Importing the package is light, and everything it promises is there."""

import subprocess
import sys

import pytest

import icl_mechinterp as icl


def test_import_loads_no_framework() -> None:
    code = "import sys, icl_mechinterp; print([m for m in ('torch', 'transformer_lens', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [*icl.__all__, "theory"])
def test_public_name_resolves(name: str) -> None:
    assert getattr(icl, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        icl.nonsense  # noqa: B018


def test_circuits_is_callable_whatever_was_imported_first() -> None:
    import icl_mechinterp.circuits

    task = icl.LinearRegression(d=3, context=5, noise=0.1)
    model = icl.attention_only(task, 2)
    assert icl.circuits(model, task).kq.shape == (1, 2, 4, 4)
    assert isinstance(icl_mechinterp.circuits.circuits(model, task), icl.Circuits)
