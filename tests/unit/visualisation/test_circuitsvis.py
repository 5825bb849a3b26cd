"""The adapter's markup is closed, escaped and symmetric; without the script there is no figure."""

import importlib.util
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from icl_mechinterp.visualisation import attention_pattern, bundle_script, colored_tokens

HOSTILE = "</script><script>alert(1)</script><!--"


def properties(markup: str) -> dict:
    match = re.search(r"CircuitsVis\.render\(\"[\w-]+\", CircuitsVis\.\w+, (.*)\)</script>$", markup)
    assert match
    return json.loads(match[1])


def test_bundle_is_one_script_that_nothing_inside_it_ends():
    script = bundle_script()
    assert script is not None
    assert script.count("</script") == 1
    assert script.endswith("</script>")
    assert "<!--" not in script
    assert "sourceMappingURL" not in script
    assert "MIT License" in script[:200]


def test_bundle_is_none_when_the_package_or_its_script_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bundle_script() is None
    origin = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: origin)
    assert bundle_script() is None


def test_pattern_is_closed_symmetric_and_unmasked():
    matrix = np.array([[1.0, 2.0], [3.0, 4.0]])
    markup = attention_pattern(matrix, ["a", "b"], element_id="kq-0", limit=0.2, width=300)
    assert markup.count("<div") == markup.count("</div>") == 2
    assert "/>" not in markup
    assert "max-width:300px" in markup
    found = properties(markup)
    assert found["attention"] == matrix.tolist()
    assert found["minValue"] == -found["maxValue"] == -0.2
    assert found["maskUpperTri"] is False


def test_labels_cannot_end_the_script():
    for markup in (
        attention_pattern(np.ones((1, 1)), [HOSTILE], element_id="a", limit=1.0),
        colored_tokens(np.ones(1), [HOSTILE], element_id="a", limit=1.0),
    ):
        assert markup.count("</script>") == 1
        assert "<!--" not in markup
    assert properties(attention_pattern(np.ones((1, 1)), [HOSTILE], element_id="a", limit=1.0))["tokens"] == [HOSTILE]


def test_tokens_that_are_written_as_html_arrive_escaped():
    tokens = properties(colored_tokens(np.ones(1), ["<img src=x onerror=alert(1)>"], element_id="a", limit=1.0))[
        "tokens"
    ]
    assert tokens == [" &lt;img src=x onerror=alert(1)&gt; "]


def test_values_that_are_not_finite_are_blank():
    found = properties(colored_tokens(np.array([np.nan, np.inf, 1.0]), ["a", "b", "c"], element_id="a", limit=1.0))
    assert found["values"] == [None, None, 1.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: attention_pattern(np.ones((2, 3)), ["a", "b"], element_id="a", limit=1.0),
        lambda: attention_pattern(np.ones((1, 1)), ["a"], element_id='a"', limit=1.0),
        lambda: colored_tokens(np.ones(1), ["a"], element_id="a", limit=0.0),
    ],
)
def test_what_cannot_be_drawn_is_refused(call):
    with pytest.raises(AssertionError):
        call()


def test_importing_the_pictures_imports_no_plotting_library():
    code = (
        "import sys, icl_mechinterp.visualisation; "
        "print([m for m in ('matplotlib', 'plotly', 'circuitsvis', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
