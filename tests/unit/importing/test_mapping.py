"""Mappings name what no rule recognises."""

from pathlib import Path

import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp.importing import WeightsError

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)
MODEL = icl.attention_only(TASK, 2, seed=1)
STACKED = icl.export_weights(MODEL, "stacked")
NAMES = {"q": "alpha", "k": "beta", "v": "gamma", "o": "delta"}


def same(model) -> bool:
    weights = ("W_Q", "W_K", "W_V", "W_O")
    return all(torch.equal(getattr(model.blocks[0].attn, w), getattr(MODEL.blocks[0].attn, w)) for w in weights)


def test_a_yaml_file_says_what_is_what(tmp_path: Path) -> None:
    state = {NAMES[role]: STACKED[f"{role}.weight"] for role in "qkvo"}
    state |= {"beta": state["beta"].mT, "gamma": state["gamma"].movedim(0, 2), "counter": torch.ones(3)}
    file = tmp_path / "mapping.yaml"
    file.write_text(
        "q: {name: alpha, transpose: false}\nk: {name: beta, transpose: true}\n"
        "v: {name: gamma, transpose: false, head_axis: 2}\no: {name: delta, transpose: false}\nignore: [counter]\n"
    )
    assert same(icl.import_weights(state, TASK, mapping=file, scale=0.5))
    assert same(icl.import_weights(state, TASK, mapping=str(file), scale=0.5))


@pytest.mark.parametrize("layout", ["fused", "fused_transposed", "stacked", "stacked_transposed", "heads"])
def test_export_is_the_inverse_under_the_same_mapping(layout: str) -> None:
    mapping = {role: f"{name}.{{head}}" if layout == "heads" else name for role, name in NAMES.items()}
    state = icl.export_weights(MODEL, layout, mapping=mapping)
    assert {name.partition(".")[0] for name in state} == set(NAMES.values())
    assert same(icl.import_weights(state, TASK, mapping=mapping, layout=layout, n_heads=2, scale=0.5))


def test_head_axis_is_a_word_on_orientation() -> None:
    fused = icl.export_weights(MODEL, "fused_transposed")
    mapping = {role: {"name": f"{role}.weight", "head_axis": 0 if role == "o" else 1} for role in "qkvo"}
    assert same(icl.import_weights(fused, TASK, mapping=mapping, scale=0.5))


def test_a_bias_has_a_role(tmp_path: Path) -> None:
    state = {NAMES[role]: STACKED[f"{role}.weight"] for role in "qkvo"} | {"epsilon": torch.arange(8.0)}
    mapping = {r: {"name": NAMES[r], "transpose": False} for r in "qkvo"} | {"k_bias": "epsilon"}
    model = icl.import_weights(state, TASK, mapping=mapping, scale=0.5)
    assert torch.equal(model.blocks[0].attn.b_K, torch.arange(8.0).view(2, 4))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"q": "alpha", "k": "beta", "v": "gamma"}, "the mapping lacks o; it has q, k, v.*Give the name"),
        ({**NAMES, "v": "beta"}, "gives 'beta' twice, as k and as v.*of its own"),
        ({**NAMES, "w": "x"}, "mapping.w is not a role; roles are q, k, v, o"),
        ({**NAMES, "q": 3}, "mapping.q is a name, or has the keys name, transpose, head_axis; got 3"),
        ({**NAMES, "q": {"name": "alpha", "transposed": True}}, "mapping.q.transposed.*Did you mean 'transpose'"),
        ({**NAMES, "q": {"name": "alpha", "transpose": "yes"}}, "transpose must be true or false; got 'yes'"),
        ({**NAMES, "q": {"name": "alpha", "head_axis": 4}}, "head_axis must be 0, 1 or 2; got 4"),
        ({**NAMES, "ignore": "x"}, "mapping.ignore is a list of names; got 'x'"),
        (["q"], "a mapping has the keys"),
    ],
)
def test_mistakes_in_a_mapping_are_named(mapping, message: str) -> None:
    state = {NAMES[role]: STACKED[f"{role}.weight"] for role in "qkvo"}
    with pytest.raises(icl.ConfigError, match=message) as caught:
        icl.import_weights(state, TASK, mapping=mapping, scale=0.5)
    assert caught.value.field is not None
    assert caught.value.field.startswith("mapping")


def test_transpose_and_head_axis_may_not_contradict() -> None:
    fused = icl.export_weights(MODEL, "fused")
    mapping = {r: f"{r}.weight" for r in "kvo"} | {"q": {"name": "q.weight", "transpose": True, "head_axis": 0}}
    with pytest.raises(icl.ConfigError, match=r"mapping.q contradicts itself.*Leave one out"):
        icl.import_weights(fused, TASK, mapping=mapping, scale=0.5)


def test_a_name_that_is_not_there_is_told_with_those_that_are() -> None:
    state = {NAMES[role]: STACKED[f"{role}.weight"] for role in "qkvo"}
    with pytest.raises(WeightsError, match=r"k is 'betta'.*no such tensor; it has alpha, beta.*Correct the name"):
        icl.import_weights(state, TASK, mapping={**NAMES, "k": "betta"}, scale=0.5)


@pytest.mark.parametrize("text", ["q: [", "\x00", "!!python/object/apply:os.system ['true']"])
def test_a_mapping_file_is_data(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mapping.yaml"
    file.write_text(text)
    with pytest.raises(icl.ConfigError, match=r"mapping\.yaml is not YAML.*Correct the file"):
        icl.import_weights(STACKED, TASK, mapping=file, scale=0.5)
    with pytest.raises(icl.ConfigError, match=r"cannot be read"):
        icl.import_weights(STACKED, TASK, mapping=tmp_path / "none.yaml", scale=0.5)
