"""The usual spellings of q, k, v and o."""

import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp.importing import WeightsError
from icl_mechinterp.importing.names import parse_name

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)
MODEL = icl.attention_only(TASK, 2, seed=1)
FUSED = icl.export_weights(MODEL, "fused")

SPELLINGS = [
    "{}",
    "{}.weight",
    "W_{}",
    "w_{}",
    "W{}",
    "attn.W_{}.weight",
    "{}_proj.weight",
    "attention_layer.{}_proj.weight",
    "module.layers.0.self_attn.{}_proj.weight",
    "transformer.h.0.attn.to_{}.weight",
    "_orig_mod.blocks.0.{}_linear.weight",
    "net.3.fc_{}.weight",
    "weight_{}",
    "{}_matrix",
]


@pytest.mark.parametrize("case", [str.lower, str.upper])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_usual_spellings_are_read(spelling: str, case) -> None:
    words = {"q": "q", "k": "k", "v": "v", "o": "o"}
    state = {spelling.format(case(word)): FUSED[f"{role}.weight"] for role, word in words.items()}
    again = icl.import_weights(state, TASK, scale=0.5)
    assert torch.equal(again.blocks[0].attn.W_Q, MODEL.blocks[0].attn.W_Q)
    assert torch.equal(again.blocks[0].attn.W_O, MODEL.blocks[0].attn.W_O)


@pytest.mark.parametrize("words", [("query", "key", "value", "out"), ("queries", "keys", "values", "output")])
def test_whole_words_are_read(words: tuple[str, ...]) -> None:
    state = {f"attn.{word}.weight": FUSED[f"{role}.weight"] for role, word in zip("qkvo", words, strict=True)}
    assert torch.equal(icl.import_weights(state, TASK, scale=0.5).blocks[0].attn.W_V, MODEL.blocks[0].attn.W_V)


@pytest.mark.parametrize(
    "spelling", ["heads.{h}.{r}.weight", "{r}.{h}.weight", "head_{h}.W_{r}", "W_{r}_{h}", "{r}{h}"]
)
def test_lists_of_heads_are_read(spelling: str) -> None:
    heads = icl.export_weights(MODEL, "heads")
    state = {spelling.format(h=h, r=r): heads[f"heads.{h}.{r}.weight"] for h in (1, 0) for r in "qkvo"}
    again = icl.import_weights(state, TASK, scale=0.5, layout="heads")
    assert torch.equal(again.blocks[0].attn.W_K, MODEL.blocks[0].attn.W_K)
    assert torch.equal(again.blocks[0].attn.W_O, MODEL.blocks[0].attn.W_O)


def test_heads_of_their_own_with_one_output_for_all() -> None:
    heads = icl.export_weights(MODEL, "heads")
    state = {name: tensor for name, tensor in heads.items() if ".o." not in name}
    again = icl.import_weights({**state, "out.weight": FUSED["o.weight"]}, TASK, scale=0.5, layout="heads")
    assert torch.equal(again.blocks[0].attn.W_O, MODEL.blocks[0].attn.W_O)


@pytest.mark.parametrize("axis", [0, 1])
def test_q_k_and_v_in_one_matrix_are_taken_apart(axis: int) -> None:
    model = icl.attention_only(TASK, 2, d_head=2, seed=1)
    fused = icl.export_weights(model, "fused")
    together = torch.cat([fused[f"{role}.weight"] for role in "qkv"])
    state = {"in_proj_weight": together if axis == 0 else together.T, "out_proj.weight": fused["o.weight"]}
    again = icl.import_weights(state, TASK, scale=0.5, n_heads=2, layout="fused")
    assert torch.equal(again.blocks[0].attn.W_K, model.blocks[0].attn.W_K)


@pytest.mark.parametrize("name", ["norm.weight", "mlp.0.weight", "attn.lora_a.weight", "query.norm.weight", "x", ""])
def test_other_names_are_nobodys(name: str) -> None:
    assert parse_name(name) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v.weight": None}, "no tensor with a usual name for v; it has .*q.weight.*mapping file"),
        ({"old.q.weight": "q.weight"}, "weight of q twice: q.weight and old.q.weight.*mapping file"),
        ({"layers.1.q.weight": "q.weight"}, r"several layers \(layers.1.q.weight\)"),
        ({"norm.weight": "q.weight"}, "also holds norm.weight.*ignore"),
        ({"q.0.weight": "q.weight"}, "q both for all heads and per head"),
        ({"in_proj_weight": "q.weight", "q.weight": None}, r"in_proj_weight \(8, 4\) cannot be taken apart"),
    ],
)
def test_names_that_leave_questions_are_told(changes: dict[str, str | None], message: str) -> None:
    state = dict(FUSED)
    for name, copied in changes.items():
        if copied is None:
            del state[name]
        else:
            state[name] = FUSED[copied]
    with pytest.raises(WeightsError, match=message):
        icl.import_weights(state, TASK, scale=0.5)


def test_a_head_that_is_missing_is_told() -> None:
    heads = icl.export_weights(icl.attention_only(TASK, 3), "heads")
    state = {name: tensor for name, tensor in heads.items() if not name.startswith("heads.1")}
    with pytest.raises(WeightsError, match=r"q for the heads 0, 2, not for 0 to 2"):
        icl.import_weights(state, TASK, scale=0.5, layout="heads")


@pytest.mark.parametrize("name", ["mask", "attn.causal_mask", "attn.tril"])
def test_masks_and_counters_are_no_weights(name: str) -> None:
    state = {**FUSED, name: torch.ones(7, 7).tril(), "steps": torch.tensor(7), "norm.bias": torch.zeros(4)}
    assert torch.equal(icl.import_weights(state, TASK, scale=0.5).blocks[0].attn.W_Q, MODEL.blocks[0].attn.W_Q)
