"""Every layout is a permutation of axes: what goes out comes back with every bit."""

import math

import pytest
import torch
from transformer_lens import HookedTransformer

import icl_mechinterp as icl
from icl_mechinterp.importing import LAYOUTS, WeightsError
from icl_mechinterp.models import hooked_prediction

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)
PAPERS = [layout for layout in LAYOUTS if layout != "transformer_lens"]


def model_of(n_heads: int = 2, **options) -> HookedTransformer:
    return icl.attention_only(TASK, n_heads, seed=5, **options)


def same_tensors(one: HookedTransformer, other: HookedTransformer) -> None:
    """All parameters that the two have, with every bit."""
    others = dict(other.named_parameters())
    assert set(others) == {name for name, _ in one.named_parameters()}
    for name, parameter in one.named_parameters():
        assert parameter.dtype == others[name].dtype
        assert torch.equal(parameter, others[name]), name


@pytest.mark.parametrize(("n_heads", "d_head"), [(1, 4), (2, 4), (2, 3), (3, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_trip_keeps_every_bit(layout: str, n_heads: int, d_head: int) -> None:
    model = model_of(n_heads, d_head=d_head)
    state = icl.export_weights(model, layout)
    again = icl.import_weights(state, TASK, layout=layout, n_heads=n_heads, scale=1 / math.sqrt(d_head))
    same_tensors(again, model)
    exported_again = icl.export_weights(again, layout)
    assert list(exported_again) == list(state)
    assert all(torch.equal(exported_again[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("layout", PAPERS)
def test_label_rows_alone_make_the_same_predictor(layout: str) -> None:
    model = model_of()
    model.blocks[0].attn.W_O.data[..., : TASK.d] = 1e3  # read out by nothing
    state = icl.export_weights(model, layout, rows="labels")
    again = icl.import_weights(state, TASK, layout=layout, n_heads=2, scale=0.5)
    assert torch.equal(again.blocks[0].attn.W_O[..., TASK.d :], model.blocks[0].attn.W_O[..., TASK.d :])
    assert not bool(again.blocks[0].attn.W_O[..., : TASK.d].any())
    z = TASK.sample(8, generator=torch.Generator().manual_seed(0)).z
    assert torch.equal(hooked_prediction(again, z), hooked_prediction(model, z))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_double_precision_survives(layout: str) -> None:
    model = model_of().to(torch.float64, print_details=False)
    model.blocks[0].attn.W_Q.data += 1e-12
    again = icl.import_weights(icl.export_weights(model, layout), TASK, layout=layout, n_heads=2, scale=0.5)
    same_tensors(again, model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_says_how_it_is_to_be_read(layout: str, tmp_path) -> None:
    model = model_of(1)  # square matrices: nothing else would tell
    file = tmp_path / "weights.safetensors"
    icl.export_weights(model, layout, file=file)
    again = icl.import_weights(file, TASK)
    same_tensors(again, model)
    assert again.blocks[0].attn.attn_scale == pytest.approx(model.blocks[0].attn.attn_scale, rel=1e-15)
    with pytest.raises(icl.ConfigError, match=r"scale is 3.*says of itself 0\.5"):
        icl.import_weights(file, TASK, scale=3.0)


def test_layers_survive_in_transformer_lens_own_layout() -> None:
    model = model_of(n_layers=3, d_head=2)
    state = icl.export_weights(model, "transformer_lens")
    same_tensors(icl.import_weights(state, TASK, scale=1 / math.sqrt(2)), model)
    with pytest.raises(WeightsError, match=r"3 layers.*'fused' holds one.*transformer_lens"):
        icl.export_weights(model, "fused")


def test_a_hooked_transformers_own_state_dict_is_read() -> None:
    model = model_of()
    same_tensors(icl.import_weights(model.state_dict(), TASK, scale=0.5), model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_are_carried(layout: str) -> None:
    model = model_of(n_heads=3, d_head=2)
    attention = model.blocks[0].attn
    for bias in (attention.b_Q, attention.b_K, attention.b_V, attention.b_O):
        bias.data.normal_(generator=torch.Generator().manual_seed(bias.numel()))
    state = icl.export_weights(model, layout)
    same_tensors(icl.import_weights(state, TASK, layout=layout, n_heads=3, scale=1 / math.sqrt(2)), model)


def test_exported_tensors_are_copies() -> None:
    model = model_of()
    for layout in LAYOUTS:
        for tensor in icl.export_weights(model, layout).values():
            assert tensor.is_contiguous()
            tensor.zero_()
    assert all(bool(weight.any()) for weight in (model.blocks[0].attn.W_Q, model.blocks[0].attn.W_O))


def test_a_model_that_no_layout_holds_is_refused() -> None:
    model = model_of()
    model.unembed.W_U.data[0] = 1.0
    with pytest.raises(WeightsError, match=r"read-out of its own.*state_dict"):
        icl.export_weights(model)
    with pytest.raises(WeightsError, match=r"read-out of its own.*coordinates="):
        icl.import_weights(model.state_dict(), TASK, scale=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "fussed"}, r"layout must be one of.*'fussed'.*Did you mean 'fused'"),
        ({"rows": "all"}, "rows must be one of tokens, labels; got 'all'"),
        ({"file": "weights.pt"}, "must end in .safetensors; got 'weights.pt'"),
        ({"layout": "transformer_lens", "rows": "labels"}, "own names and all rows; leave rows out"),
        ({"mapping": {r: r for r in "qkvo"}, "layout": "heads"}, "mapping.q is 'q'.*{head}"),
    ],
)
def test_wrong_options_of_an_export_are_named(options: dict, message: str) -> None:
    with pytest.raises(icl.ConfigError, match=message):
        icl.export_weights(model_of(), **options)
