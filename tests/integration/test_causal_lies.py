"""Models whose weights tell another story than what they do: none of them passes, and the verdict says what is wrong."""

from collections.abc import Callable

import pytest
import torch
from transformer_lens import HookedTransformer

import icl_mechinterp as icl
from icl_mechinterp import theory
from icl_mechinterp.probes.interchange import realised_algorithm
from icl_mechinterp.tasks import LinearRegression
from tests.planted import Heads, build, sane_pair

TASK = LinearRegression(5, 40, 0.1)
PAIR = sane_pair(TASK, gamma=0.13)
STEP = float(theory.optimal_step(5, 40, 0.1))


def overwritten(predict: Callable[[torch.Tensor], torch.Tensor]) -> HookedTransformer:
    """The planted pair, whose output at the query a permanent hook replaces by an algorithm's answer to the prompt."""
    model, seen = build(PAIR, TASK), {}

    def remember(residual: torch.Tensor, hook: object) -> None:
        del hook
        seen["z"] = residual.detach()

    def replace(residual: torch.Tensor, hook: object) -> torch.Tensor:
        del hook
        z = seen["z"].clone()
        changed = residual.clone()
        changed[:, -1, TASK.d :] = predict(z).to(residual.dtype)
        return changed

    model.add_perma_hook("blocks.0.hook_resid_pre", remember)
    model.add_perma_hook("blocks.0.hook_resid_post", replace)
    return model


def silenced(head: int) -> HookedTransformer:
    """The planted pair with one head's output set to zero by a permanent hook: its weights are bypassed."""
    model = build(PAIR, TASK)

    def silence(z: torch.Tensor, hook: object) -> torch.Tensor:
        del hook
        changed = z.clone()
        changed[:, :, head] = 0.0
        return changed

    model.add_perma_hook("blocks.0.attn.hook_z", silence)
    return model


def test_weights_of_debiased_gd_whose_output_is_ridge() -> None:
    model = overwritten(lambda z: theory.ridge(z, TASK.d * TASK.noise))
    report = icl.probe(model, TASK)
    assert not report.passed
    assert report.algorithm == "none"
    assert report["equivalence"]["distance_ridge"].passed is False
    assert realised_algorithm(report["interchange"]) == "ridge"
    assert report["structure"]["zero_sum"].status == "undecided"
    assert "circuits alone do not give" in str(report["structure"]["zero_sum"].reason)
    assert report["interchange"]["normaliser"].status == "undecided", "no softmax denominator is known of a black box"


def test_a_bypassed_head_is_not_believed() -> None:
    """What is left is one head: a kernel, whatever the other head's weights look like."""
    report = icl.probe(silenced(1), TASK)
    assert not report.passed
    assert report.algorithm != "debiased gradient descent"
    assert report["equivalence"]["distance_nadaraya_watson"].value == pytest.approx(0, abs=1e-3)
    assert {m.status for m in report["structure"].values() if m.required} == {"undecided"}
    assert {m.status for m in report["ablation"].values()} == {"undecided"}


def test_two_heads_that_cancel_are_seen() -> None:
    """Equal KQ, opposite OV: they do nothing together, and each of them alone would."""
    kq = torch.cat([PAIR.kq, PAIR.kq[:1], PAIR.kq[:1]])
    ov = torch.cat([PAIR.ov, PAIR.ov[:1], -PAIR.ov[:1]])
    report = icl.probe(build(Heads(kq, ov), TASK), TASK)
    assert not report.passed
    assert [head.label for head in report.heads] == ["positive", "negative", "positive", "mixed"]
    assert report["structure"]["sign_matching"].passed is False
    assert all(m.passed for m in report["equivalence"].values()), "the function is the pair's"
    for part in ("computes debiased gradient descent", "not with the structure of the theory", "sign_matching"):
        assert part in report.verdict
    table = report["ablation"]["head_effect_gap"].detail["table"]
    alone = next(row for row in table if row["heads"] == [3] and row["kind"] == "zero")
    assert alone["loss"] > 2 * report["equivalence"]["loss"].value, "without the one that cancels, the other is bare"


def test_a_tiny_scale_with_a_large_value_is_an_active_head() -> None:
    """omega of .002: its attention is flat to the eye, and the pair is debiased GD all the same."""
    tiny = sane_pair(TASK, gamma=0.002)
    report = icl.probe(build(tiny, TASK, dtype=torch.float64), TASK)
    assert report.passed, report.verdict
    assert [head.label for head in report.heads] == ["positive", "negative"]


def test_a_negative_copy_in_another_layer_is_not_read_off_the_first() -> None:
    model = icl.attention_only(TASK, n_heads=2, n_layers=2, seed=0)
    one = build(PAIR, TASK)
    for layer, sign in ((0, 1.0), (1, -1.0)):
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            weight = getattr(one.blocks[0].attn, name).data
            getattr(model.blocks[layer].attn, name).data.copy_(sign * weight if name == "W_O" else weight)
    report = icl.probe(model, TASK)
    assert not report.passed
    assert report.heads == ()
    assert {m.status for m in report["structure"].values()} == {"undecided"}
    assert report["equivalence"]["distance_debiased_gd"].passed is False
