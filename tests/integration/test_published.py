"""Weights and curves that somebody else published, as real input."""

import importlib.util
from pathlib import Path

import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp import theory

_FILE = Path(__file__).parents[2] / "examples" / "published_weights.py"
_spec = importlib.util.spec_from_file_location("published_weights", _FILE)
assert _spec is not None
assert _spec.loader is not None
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)


def test_the_published_two_head_model_is_debiased_gradient_descent() -> None:
    report = icl.probe(example.published_model("two_head"), example.TASK, prompts=20_000)
    assert report.passed, report.verdict
    assert [h.label for h in report.heads] == ["negative", "positive"]
    # what the authors' notebook printed of this checkpoint: mean diagonals -.1265 and .1258, ratio .99952 / .99957
    assert report.heads[0].omega == pytest.approx(-0.1265, abs=5e-5)
    assert report.heads[1].omega == pytest.approx(0.1258, abs=5e-5)
    worst = report["structure"]["off_diagonal_energy"].detail["per_head"]
    assert sorted(worst.values()) == pytest.approx([1 - 0.99957**2, 1 - 0.99952**2], abs=3e-5)


def test_the_published_single_head_is_a_kernel_regressor() -> None:
    report = icl.probe(example.published_model("one_head", [-1.485]), example.TASK, prompts=20_000)
    assert report.algorithm == "kernel regressor"
    assert not report.passed
    assert report["structure"]["zero_sum"].value == 1.0
    kernel = report["equivalence"]["distance_nadaraya_watson"]
    assert kernel.detail["kernel_omega"] == pytest.approx(report.heads[0].omega, rel=0.02)


def test_untrained_published_entries_do_not_matter() -> None:
    """The last column of the printed KQ is initialisation noise; any other noise there gives the same report."""
    model = example.published_model("two_head")
    noisy = example.published_model("two_head")
    noisy.blocks[0].attn.W_Q.data[:, example.TASK.d :] *= 1e4
    reports = [icl.probe(m, example.TASK, prompts=2_000) for m in (model, noisy)]
    assert not torch.equal(model.blocks[0].attn.W_Q, noisy.blocks[0].attn.W_Q)
    assert reports[0] == reports[1]


def test_published_error_curves_follow_the_exact_risk() -> None:
    """From L = 40 on, the published curves of H = 2, 4, 8 are debiased GD's with one step, within their sampling noise."""
    curves = example.PUBLISHED["mse_by_length"]
    for heads in (2, 4, 8):
        gaps = [
            abs(published - theory.debiased_gd_risk(0.88, 5, context, 0.1)) / published
            for context, published in zip(curves["context"], curves[f"heads_{heads}"], strict=True)
            if context >= 40
        ]
        assert max(gaps) < 0.025
    single = [one / two for one, two in zip(curves["heads_1"], curves["heads_2"], strict=True)]
    assert min(single) > 1.4, "one head is worse at every length"


def test_the_example_prints_both_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    reports = {
        "a": icl.probe(example.published_model("two_head"), example.TASK, prompts=2_000),
        "b": icl.probe(example.published_model("one_head", [-1.485]), example.TASK, prompts=2_000),
    }
    example.print_reports(reports)
    example.print_curves()
    printed = capsys.readouterr().out
    for part in ("structure.zero_sum", "equivalence.distance_debiased_gd", "kernel regressor", "0.2409"):
        assert part in printed
