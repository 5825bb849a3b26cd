"""The report page says everything the records say, and nothing in the records can break it."""

import html
import json
import math
import re
import shutil

import numpy as np
import pytest

from icl_mechinterp.circuits import History
from icl_mechinterp.errors import RunError, UserError
from icl_mechinterp.probes.structure import NAMES
from icl_mechinterp.reporting import page as page_module
from icl_mechinterp.reporting import render_report
from icl_mechinterp.reporting.explanations import EXPLANATIONS
from icl_mechinterp.reporting.page import number
from icl_mechinterp.results import Measurement, ProbeReport, ProbeResult
from icl_mechinterp.visualisation import circuitsvis
from tests.helpers_report import PLANTED, THEORY, make_report, make_run, write_history

HOSTILE = "<script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("report") / "two-head")


@pytest.fixture(scope="module")
def text(run) -> str:
    return render_report([run], theory_lines=THEORY)


def without_scripts(text: str) -> str:
    return re.sub(r"<script>.*?</script>", "", text, flags=re.S)


def visible(text: str) -> str:
    """What a reader sees, tags and scripts removed."""
    bare = re.sub(r"<style>.*?</style>", "", without_scripts(text), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", bare)).split())


def test_every_measurement_stands_with_value_status_and_explanation(run, text):
    rows = dict(re.findall(r'<tr data-measurement="([\w.]+)">(.*?)</tr>', text, flags=re.S))
    (report,) = run.final_reports
    assert set(rows) == {f"{probe}.{m.name}" for probe, m in report.measurements}
    for probe, m in report.measurements:
        row = visible(rows[f"{probe}.{m.name}"])
        assert m.status in row
        assert EXPLANATIONS[m.name] in row
        assert ("–" if m.value is None else f"{m.value:.4g}") in row
        assert m.threshold is None or f"{m.rule} {m.threshold:.4g}" in row
        assert m.reason is None or m.reason in row


def test_first_come_verdict_evidence_and_heads(run, text):
    seen = visible(text)
    (report,) = run.final_reports
    order = [report.verdict, "3 passed, 1 failed, 1 undecided", "H0 positive 0.1482 2.93 0.499", "zero_sum *"]
    places = [seen.index(part) for part in order]
    assert places == sorted(places)
    assert "2 passed, 0 failed, 1 undecided" in seen


def test_page_needs_nothing_from_outside(text):
    markup = without_scripts(text)
    assert not re.search(r"""(src|href)=["'](?!data:|\#)""", markup)
    assert "@import" not in markup
    assert "url(" not in markup
    assert text.count("CircuitsVis 1.") == 1  # the script is there once


def test_every_picture_has_a_static_form_and_words(text):
    alternatives = re.findall(r'<img alt="([^"]+)"', text)
    assert [alt.split()[0] for alt in alternatives] == ["Heat", "Heat", "Four"]
    assert len(re.findall(r"<img ", text)) == len(alternatives)


def test_meaningless_entries_reach_no_picture(text):
    for match in re.findall(r"CircuitsVis\.AttentionPattern, (.*?)\)</script>", text):
        figure = json.loads(match)
        assert figure["attention"][-1] == [None] * 6  # the query's label, over every key
        assert figure["maxValue"] < 0.2 < PLANTED
        assert figure["minValue"] == -figure["maxValue"]


def test_config_versions_and_commands_are_there_and_the_config_can_be_used_again(run, text):
    seen = visible(text)
    assert "torch 2.13.0" in seen
    assert f"icl-mechinterp probe {run.path}" in seen
    assert "optimizer: adam" in seen
    assert "schema_version" not in re.findall(r"<pre.*?</pre>", text, flags=re.S)[-1]


@pytest.mark.parametrize(
    ("facts", "probed"),
    [
        ({"attached": {"checkpoints": False}}, False),
        ({"attached": {"checkpoints": True}}, True),
        ({"imported": {"file": "w"}}, True),
    ],
)
def test_a_run_that_was_not_trained_here_is_told_no_command_that_would_fail(tmp_path, facts, probed):
    run = make_run(tmp_path / "elsewhere", **facts)
    seen = visible(render_report([run], theory_lines=THEORY))
    assert "icl-mechinterp train" not in seen
    assert "was not trained by icl-mechinterp" in seen
    assert (f"icl-mechinterp probe {run.path}" in seen) == probed


def test_strings_from_outside_are_escaped(tmp_path):
    report = make_report(verdict=HOSTILE, algorithm=HOSTILE)
    hostile = ProbeReport(
        heads=report.heads,
        results=(
            ProbeResult(HOSTILE, (Measurement.undecided(HOSTILE, HOSTILE, unit=HOSTILE, threshold=1.0),)),
            *report.results,
        ),
        verdict=HOSTILE,
        algorithm=HOSTILE,
        task={},
        model={},
        probe_seed=0,
        step=0,
        seed=0,
        notes=(HOSTILE,),
    )
    run = make_run(
        tmp_path / "<script>alert(1)<" / "x",
        history=False,
        reports=[hostile],
        versions={HOSTILE: HOSTILE},
        extra=HOSTILE,
    )
    text = render_report([run, make_run(tmp_path / "<img src=x onerror=alert(1)>", history=False)], theory_lines={})
    assert HOSTILE not in text
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert html.escape(HOSTILE, quote=False) in text.replace("&#39;", "'")


def test_run_without_anything_says_so(tmp_path):
    run = make_run(tmp_path / "bare", history=False, reports=())
    seen = visible(render_report([run], theory_lines={}))
    assert "no probe report yet" in seen
    assert "no training curves yet" in seen
    assert "no circuits yet" in seen
    assert "CircuitsVis" not in render_report([run], theory_lines={})


def test_run_with_an_empty_history_says_so(tmp_path):
    run = make_run(tmp_path / "empty", n_steps=0, reports=())
    assert "because nothing was captured" in visible(render_report([run], theory_lines=THEORY))


def test_damaged_parts_are_named_and_the_rest_is_shown(tmp_path):
    run = make_run(tmp_path / "damaged", n_steps=2)
    (run.path / "probes.jsonl").write_text("not json\n{}\n")
    seen = visible(render_report([run], theory_lines=THEORY))
    assert "probe reports cannot be read" in seen
    assert "Circuits at step 500" in seen


def test_history_without_a_loss_has_the_other_curves(tmp_path):
    run = make_run(tmp_path / "attached", history=False, reports=())
    history = History(
        run.path / "history.zarr", "metrics", dims=dict.fromkeys(("omega", "mu"), ("layer", "head")), labels={}
    )
    history.add(0, {"omega": np.ones((1, 1, 2)), "mu": np.ones((1, 1, 2))})
    history.flush()
    assert "Four line charts" in render_report([run], theory_lines=THEORY)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite(tmp_path, bad):
    run = make_run(tmp_path / "diverged", history=False)
    write_history(run.path, (0,), 3, spoil=bad)
    text = render_report([run], theory_lines={"optimal_step": bad, "best_loss": bad})
    assert "Circuits at step 1000" in text
    assert "NaN" not in "".join(re.findall(r"CircuitsVis\.render.*?</script>", text))


def test_number():
    assert number(None) == "–"
    assert number(0.123456) == "0.1235"
    assert number(math.nan) == "not finite (nan)"
    assert number("text") == "text"


def test_many_seeds_are_counted_listed_and_the_first_few_shown(tmp_path):
    seeds = (3, 4, 5, 6)
    algorithms = ["debiased gradient descent", "none", "debiased gradient descent", "kernel regressor"]
    reports = [
        make_report(seed=s, algorithm=a, verdict=f"Sentence {s}.") for s, a in zip(seeds, algorithms, strict=True)
    ]
    text = render_report([make_run(tmp_path / "many", seeds=seeds, n_steps=3, reports=reports)], theory_lines=THEORY)
    seen = visible(text)
    assert "2 of 4 seeds: debiased gradient descent; 1 of 4 seeds: none; 1 of 4 seeds: kernel regressor." in seen
    assert all(f"{s} {a} Sentence {s}." in seen for s, a in zip(seeds, algorithms, strict=True))
    assert len(re.findall('alt="Heat maps of KQ', text)) == page_module.SEEDS_SHOWN
    assert text.count("CircuitsVis.AttentionPattern,") == 2  # two heads of the first seed


def test_runs_stand_in_one_page_each_as_on_its_own(tmp_path, run, text):
    other = make_run(tmp_path / "other", n_steps=2)
    alone, text = text, render_report([run, other], theory_lines=[THEORY, {}])
    first = r'<article class="run" id="run0">.*?</article>'
    assert re.search(first, text, flags=re.S)[0] == re.search(first, alone, flags=re.S)[0]  # the same bytes again
    assert re.findall(r'href="#(\w+)">([\w-]+)<', text) == [("run0", "two-head"), ("run1", "other")]
    ids = re.findall(r'id="([\w-]+)"', without_scripts(text))
    assert len(ids) == len(set(ids))


def test_page_without_the_script_has_the_static_pictures(run, monkeypatch):
    monkeypatch.setattr(circuitsvis.importlib.util, "find_spec", lambda name: None)
    text = render_report([run], theory_lines=THEORY)
    assert "<script" not in text
    assert text.count("<img ") == 3


def test_models_of_several_layers_have_a_picture_per_layer(tmp_path):
    run = make_run(tmp_path / "deep", n_steps=2, reports=())
    shutil.rmtree(run.path / "history.zarr")
    dims = {"kq": ("layer", "head", "key", "query"), "ov": ("layer", "head", "out", "token")}
    history = History(run.path / "history.zarr", "circuits", dims=dims, labels={})
    history.add(0, {"kq": np.ones((1, 2, 2, 6, 6)), "ov": np.ones((1, 2, 2, 1, 6))})
    history.flush()
    text = render_report([run], theory_lines=THEORY)
    assert "L1H1" in text
    assert "no training curves yet" in visible(text)
    assert "no circuits yet" not in visible(text)
    figures = [json.loads(match) for match in re.findall(r"CircuitsVis\.AttentionPattern, (.*?)\)</script>", text)]
    # the query's label slot is empty in the first layer only
    assert [figure["attention"][-1] == [None] * 6 for figure in figures] == [True, True, False, False]


def test_writes_the_whole_page_or_none(tmp_path):
    bare = make_run(tmp_path / "bare", history=False)
    out = tmp_path / "new" / "report.html"
    assert render_report([bare], theory_lines=THEORY, out=out) == out
    assert out.read_text("utf-8").rstrip().endswith("</html>")
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"could not be written.*Choose another --out"):
        render_report([bare], theory_lines=THEORY, out=tmp_path / "file" / "report.html")


def test_no_run_is_a_mistake():
    with pytest.raises(UserError, match="at least one run"):
        render_report([], theory_lines={})


def test_every_default_measurement_has_an_explanation():
    equivalence = ["loss", *(f"distance_{n}" for n in ("debiased_gd", "gd", "ridge", "nadaraya_watson"))]
    expected = {*NAMES, *equivalence, "shift_covariates", "shift_labels"}
    assert set(EXPLANATIONS) >= expected
    assert all("\n" not in text and len(text) < 200 for text in EXPLANATIONS.values())
