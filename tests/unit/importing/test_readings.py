"""What shapes leave open is asked for, or decided by the original's predictions; never guessed."""

import math
import re

import numpy as np
import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp.importing import WeightsError, read_weights
from icl_mechinterp.importing.readings import _unpacked
from tests import helpers

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)
Z = TASK.sample(16, generator=torch.Generator().manual_seed(4)).z


def state_of(layout: str, n_heads: int = 2, rows: str = "tokens", **options) -> dict[str, torch.Tensor]:
    return icl.export_weights(icl.attention_only(TASK, n_heads, seed=2, **options), layout, rows=rows)


def papers_formula(state: dict[str, torch.Tensor], n_heads: int, scale: float):
    """The predictor of fused `nn.Linear` weights, from the formula in the papers."""
    q, k, v = (state[f"{r}.weight"].double().numpy().reshape(n_heads, -1, 4) for r in "qkv")
    o = state["o.weight"].double().numpy()[-1:].reshape(1, n_heads, -1).transpose(1, 0, 2)
    kq = scale * np.einsum("hek,heq->hkq", k, q)
    return lambda z: torch.from_numpy(helpers.closed_form(z.double().numpy(), kq, o @ v)).float()


@pytest.mark.parametrize(
    ("layout", "rows", "readings"),
    [
        ("stacked", "tokens", ["layout='stacked', n_heads=2", "layout='stacked_transposed', n_heads=2"]),
        ("heads", "tokens", ["layout='heads', n_heads=2", "layout='heads_transposed', n_heads=2"]),
        ("heads_transposed", "labels", ["layout='heads'", "layout='heads_transposed'"]),
    ],
)
def test_square_stacks_leave_two_readings(layout: str, rows: str, readings: list[str]) -> None:
    with pytest.raises(WeightsError, match=r"can be read in 2 ways") as caught:
        icl.import_weights(state_of(layout, rows=rows), TASK, scale=0.5)
    assert all(reading in str(caught.value) for reading in readings)
    assert "out x in" in str(caught.value)
    assert "predictions=" in str(caught.value)


def test_one_square_matrix_may_be_one_wide_head_or_two_narrow_ones() -> None:
    state = state_of("fused", n_heads=1)
    with pytest.raises(WeightsError, match=r"can be read in 4 ways") as caught:
        icl.import_weights(state, TASK, scale=0.5)
    found = re.findall(r"layout='(\w+)', n_heads=(\d)", str(caught.value))
    assert found == [("fused", "1"), ("fused", "2"), ("fused_transposed", "1"), ("fused_transposed", "2")]
    # the layout of the papers has heads as wide as a token
    assert icl.import_weights(state, TASK, scale=0.5, layout="fused").cfg.n_heads == 1
    assert icl.import_weights(state, TASK, scale=0.5, layout="fused", n_heads=2).cfg.d_head == 2


def test_the_papers_shapes_leave_one_reading() -> None:
    for layout in ("fused", "fused_transposed"):
        for rows in ("labels", "tokens"):
            imported = read_weights(state_of(layout, n_heads=3, rows=rows), TASK, scale=0.5)
            assert (imported.layout, imported.weights.layers[0].W_Q.shape[0]) == (layout, 3)


def test_linear_layers_with_one_output_row_lie_out_x_in() -> None:
    """A `.weight` of `nn.Linear` whose output row shows the way round; a bare parameter does not."""
    state = state_of("heads", rows="labels")
    assert read_weights(state, TASK, scale=0.5).layout == "heads"
    bare = {name.removesuffix(".weight"): tensor for name, tensor in state.items()}
    with pytest.raises(WeightsError, match=r"2 ways"):
        read_weights(bare, TASK, scale=0.5)


def test_readings_that_are_the_same_tensors_are_one() -> None:
    eye = torch.eye(4).expand(2, 4, 4).clone()
    state = {"q": eye, "k": 2 * eye, "v": eye, "o": -eye}
    assert read_weights(state, TASK, scale=0.5).weights.layers[0].W_K[1, 2, 2] == 2


def test_an_output_row_may_come_without_its_axis() -> None:
    for layout, shape in (("fused", (8,)), ("stacked", (2, 4))):
        state = state_of(layout, rows="labels")
        wanted = icl.import_weights(state, TASK, layout=layout, scale=0.5)
        squeezed = {**state, "o.weight": state["o.weight"].reshape(shape)}
        found = icl.import_weights(squeezed, TASK, layout=layout, scale=0.5)
        assert torch.equal(found.blocks[0].attn.W_O, wanted.blocks[0].attn.W_O)


@pytest.mark.parametrize("scale", [0.5, 1.0, 0.25, 1 / math.sqrt(3), 1 / 6])
@pytest.mark.parametrize(("n_heads", "d_head"), [(1, 4), (2, 2), (2, 4)])
def test_predictions_decide_reading_and_scale(n_heads: int, d_head: int, scale: float) -> None:
    state = state_of("fused", n_heads, d_head=d_head)
    original = papers_formula(state, n_heads, scale)
    if scale == 1 / 6:  # L, not a power of the width
        assert TASK.context == 6
    for predictions in (original, (Z, original(Z)), (Z.numpy(), original(Z)[:, 0].numpy())):
        imported = read_weights(state, TASK, predictions=predictions)
        assert imported.scale == pytest.approx(scale, rel=1e-12)
        assert (imported.layout, imported.weights.layers[0].W_Q.shape) == ("fused", (n_heads, 4, d_head))
        assert imported.difference is not None
        assert imported.difference < 1e-5


def test_a_scale_that_is_none_of_the_usual_ones_is_given_and_checked() -> None:
    state = state_of("fused")
    original = papers_formula(state, 2, 0.77)
    with pytest.raises(WeightsError, match=r"does not predict.*of the predictions' size on 64 prompts.*give scale="):
        read_weights(state, TASK, predictions=original)
    assert read_weights(state, TASK, predictions=original, scale=0.77).difference < 1e-5
    with pytest.raises(WeightsError, match=r"does not predict.*another scale than the one given"):
        read_weights(state, TASK, predictions=original, scale=0.5)


def test_predictions_of_another_model_are_an_error() -> None:
    original = papers_formula(state_of("fused"), 2, 0.5)
    other = icl.export_weights(icl.attention_only(TASK, 2, seed=3), "fused")
    with pytest.raises(WeightsError, match=r"does not predict.*layout='fused'.*attends to itself"):
        read_weights(other, TASK, predictions=original, scale=0.5)


def test_prompts_that_tell_no_scales_apart_are_told() -> None:
    state = state_of("fused")
    original = papers_formula(state, 2, 0.5)
    same_tokens = Z[:, :1].expand(-1, 7, -1).clone()  # every key has the same logit
    same_tokens[:, -1, 3:] = 0
    with pytest.raises(WeightsError, match=r"(?s)27 readings predict what the original does.*scale=0\.5.*and 21 more"):
        read_weights(state, TASK, predictions=(same_tokens, original(same_tokens)))


def test_an_unknown_scale_is_asked_for() -> None:
    with pytest.raises(
        icl.ConfigError, match=r"scale.*is not known.*scale=.*0\.5 \(1/sqrt\(d_head\)\).*1 \(1\)"
    ) as caught:
        icl.import_weights(state_of("fused"), TASK)
    assert caught.value.field == "scale"


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        (3, "a pair .z, yhat. or a function of z; got a int"),
        ((Z, torch.zeros(3, 1)), r"z \[batch pos 4\].*got \(16, 7, 4\) and \(3, 1\)"),
        ((Z[..., :3], torch.zeros(16, 1)), r"got \(16, 7, 3\)"),
        ((Z, torch.full((16, 1), torch.nan)), "NaN or infinite"),
        ((Z + 1, torch.zeros(16, 1)), r"query has labels that are not zero.*Set z"),
        (lambda z: z, r"got \(64, 7, 4\) and \(64, 7, 4\)"),
    ],
)
def test_predictions_of_a_wrong_kind_are_named(predictions, message: str) -> None:
    with pytest.raises(icl.ConfigError, match=message) as caught:
        icl.import_weights(state_of("fused"), TASK, predictions=predictions)
    assert caught.value.field == "predictions"


def test_half_precision_is_widened_and_judged_by_its_own_rounding() -> None:
    state = state_of("fused")
    original = papers_formula(state, 2, 0.5)
    for dtype in (torch.float16, torch.bfloat16):
        half = {name: tensor.to(dtype) for name, tensor in state.items()}
        imported = read_weights(half, TASK, predictions=original, scale=0.5)
        assert imported.weights.dtype == torch.float32
        assert 1e-5 < imported.difference < 1e-1
        assert torch.equal(imported.model().blocks[0].attn.W_Q.to(dtype).mT.flatten(0, 1), half["q.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "scale must be a positive number.*got 0.0"),
        ({"scale": True}, "scale must be a positive number"),
        ({"scale": "half"}, "scale must be a positive number.*'half'"),
        ({"layout": "stakced"}, r"layout must be one of.*Did you mean 'stacked'"),
        ({"layout": "stacked"}, r"layout is 'stacked'.*the weights are fused: q.weight \(8, 4\).*Use 'fused'"),
        ({"n_heads": 0}, "n_heads must be a whole number of at least 1; got 0"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(icl.ConfigError, match=message) as caught:
        icl.import_weights(state_of("fused"), TASK, **{"scale": 0.5, **options})
    assert caught.value.field == next(iter(options))


def test_options_against_the_shapes_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"do not fit the task with n_heads=3"):
        icl.import_weights(state_of("fused"), TASK, scale=0.5, n_heads=3)
    with pytest.raises(icl.ConfigError, match=r"stacks of 2 heads.*n_heads is 3"):
        icl.import_weights(state_of("stacked"), TASK, scale=0.5, n_heads=3)
    with pytest.raises(icl.ConfigError, match=r"TransformerLens' own names"):
        icl.import_weights(state_of("transformer_lens"), TASK, scale=0.5, layout="fused")
    with pytest.raises(icl.ConfigError, match=r"n_heads is 3, and the weights have 2 heads"):
        icl.import_weights(state_of("transformer_lens"), TASK, scale=0.5, n_heads=3)


@pytest.mark.parametrize("layout", ["fused", "stacked", "heads", "transformer_lens"])
def test_another_tasks_width_is_refused(layout: str) -> None:
    wider = icl.LinearRegression(d=4, context=6, noise=0.1)
    with pytest.raises(WeightsError, match=r"d \+ N = 4 \+ 1 = 5 coordinates.*mport with the task"):
        icl.import_weights(state_of(layout), wider, scale=0.5)


def test_values_that_are_no_numbers_are_refused() -> None:
    for layout in ("fused", "transformer_lens"):
        state = state_of(layout)
        name = next(iter(state))
        state[name].view(-1)[[1, 5]] = torch.tensor([torch.nan, torch.inf])
        with pytest.raises(WeightsError, match=rf"{name} .* holds 2 value\(s\) that are NaN or infinite.*earlier"):
            icl.import_weights(state, TASK, scale=0.5)


def test_heads_of_different_widths_are_refused() -> None:
    state = state_of("heads")
    state["heads.1.q.weight"] = state["heads.1.q.weight"][:3]
    with pytest.raises(WeightsError, match=r"heads' q have different shapes: \(3, 4\), \(4, 4\)"):
        icl.import_weights(state, TASK, scale=0.5)


def test_a_bias_of_a_wrong_width_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"bias of k has shape \(3,\).*\(8,\)"):
        icl.import_weights({**state_of("fused"), "k.bias": torch.ones(3)}, TASK, scale=0.5)


def test_unpacking_refuses_heads_that_do_not_divide() -> None:
    assert _unpacked(torch.zeros(7, 4), 2, "q", "out_in") is None
    assert _unpacked(torch.zeros(4), 2, "q", "out_in") is None
