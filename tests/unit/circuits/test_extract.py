import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp.errors import ModelError
from icl_mechinterp.models import Coordinates
from tests.helpers import assert_close

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)


def test_orientation_is_the_papers(generator: torch.Generator) -> None:
    """logit = z_key^T kq z_query, read off the scores that the model itself computes."""
    model = icl.attention_only(TASK, 2, seed=1).double()
    z, _ = TASK.sample(5, generator=generator, dtype=torch.float64)
    _, cache = model.run_with_cache(z, start_at_layer=0)
    found = icl.circuits(model, TASK)
    logits = torch.einsum("blk,hkq,bq->bhl", z[:, :-1], found.kq[0], z[:, -1])
    assert_close(logits, cache["blocks.0.attn.hook_attn_scores"][:, :, -1, :-1], rtol=1e-9)
    attended = cache["blocks.0.attn.hook_pattern"][:, :, -1, :-1] @ z[:, :-1]
    prediction = torch.einsum("hot,bht->bo", found.ov[0], attended)
    assert_close(prediction, model(z, start_at_layer=0)[:, -1].detach(), rtol=1e-9)


def test_kq_is_the_transposed_scaled_qk_of_transformer_lens() -> None:
    model = icl.attention_only(TASK, 2, scale=0.25)
    expected = 0.25 * model.blocks[0].attn.QK.AB.detach().mT
    assert_close(icl.circuits(model, TASK).kq[0], expected, rtol=1e-5)


def test_a_snapshot_shares_nothing_with_the_model() -> None:
    model = icl.attention_only(TASK, 2)
    before = icl.circuits(model, TASK)
    kept = before.kq.clone()
    model.blocks[0].attn.W_K.data += 1
    assert torch.equal(before.kq, kept)
    assert not torch.equal(icl.circuits(model, TASK).kq, kept)
    assert not before.kq.requires_grad


def test_names_and_identifiable_entries() -> None:
    found = icl.circuits(icl.attention_only(TASK, 2, n_layers=2), TASK)
    assert found.token_names == ("x1", "x2", "x3", "y")
    assert not bool(found.identifiable[0, :, 3].any()), "the query's label slot is empty in the first layer"
    assert bool(found.identifiable[0, :, :3].all())
    assert bool(found.identifiable[1].all()), "later layers may find it written"


def test_unidentifiable_entries_do_not_act(generator: torch.Generator) -> None:
    model = icl.attention_only(TASK, 2)
    z, _ = TASK.sample(5, generator=generator)
    before = model(z, start_at_layer=0)[:, -1]
    attention = model.blocks[0].attn
    attention.W_Q.data[:, TASK.d :] += 1000.0  # the query-label column of KQ
    attention.W_O.data[..., : TASK.d] += 1000.0  # rows of OV that are not read out
    assert torch.equal(model(z, start_at_layer=0)[:, -1], before)


def test_coordinates_of_an_own_embedding(generator: torch.Generator) -> None:
    """A model whose residual stream is a rotation of the prompt has the circuits of the unrotated one."""
    model = icl.attention_only(TASK, 2, seed=2).double()
    expected = icl.circuits(model, TASK)
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))
    attention = model.blocks[0].attn
    for weight in (attention.W_Q, attention.W_K, attention.W_V):
        weight.data.copy_(rotation.mT @ weight.data)
    attention.W_O.data.copy_(attention.W_O.data @ rotation)
    read_out = rotation.mT @ model.unembed.W_U.detach()
    found = icl.circuits(model, TASK, coordinates=Coordinates(rotation, read_out))
    assert_close(found.kq, expected.kq, rtol=1e-9, atol=1e-12)
    assert_close(found.ov, expected.ov, rtol=1e-9, atol=1e-12)


def test_a_model_of_another_width_is_refused() -> None:
    model = icl.attention_only(icl.LinearRegression(d=4, context=6, noise=0.1), 2)
    with pytest.raises(ModelError) as caught:
        icl.circuits(model, TASK)
    for part in ("3 + 1 = 4", "d_model = 5", "task that it was trained on"):
        assert part in str(caught.value)


def test_something_else_is_refused() -> None:
    with pytest.raises(ModelError, match="got a Linear"):
        icl.circuits(torch.nn.Linear(2, 2), TASK)  # pyright: ignore
