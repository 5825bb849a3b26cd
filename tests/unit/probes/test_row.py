import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp.errors import ModelError
from icl_mechinterp.models import hooked_prediction
from icl_mechinterp.probes.row import Row, attend, require_same_as_model
from tests.helpers import assert_close

TASK = icl.LinearRegression(d=3, context=6, noise=0.1)


@pytest.fixture
def model():
    return icl.attention_only(TASK, 3, seed=2).double()


def test_heads_sum_to_the_models_prediction(model, generator: torch.Generator) -> None:
    z, _ = TASK.sample(9, generator=generator, dtype=torch.float64)
    row = Row.of(icl.circuits(model, TASK))
    assert_close(row.predict(z), hooked_prediction(model, z).detach(), rtol=1e-9, atol=1e-12)


def test_parts_from_other_prompts_are_what_a_hooked_model_does(model, generator: torch.Generator) -> None:
    """Query, keys and values taken from three prompts, against edits of hook_q, hook_k and hook_v."""
    queries, keys, values = (TASK.sample(4, generator=generator, dtype=torch.float64).z for _ in range(3))
    row = Row.of(icl.circuits(model, TASK))
    _, of_keys = model.run_with_cache(keys, start_at_layer=0)
    _, of_values = model.run_with_cache(values, start_at_layer=0)
    hooks = [
        ("blocks.0.attn.hook_k", lambda value, hook: of_keys[hook.name]),
        ("blocks.0.attn.hook_v", lambda value, hook: of_values[hook.name]),
    ]
    hooked = model.run_with_hooks(queries, start_at_layer=0, fwd_hooks=hooks)[:, -1].detach()
    assert_close(attend(row.scores(queries, keys), row.values(values)).sum(1), hooked, rtol=1e-9, atol=1e-12)


def test_own_normaliser_changes_nothing_and_another_scales_each_head(model, generator: torch.Generator) -> None:
    z, other = (TASK.sample(4, generator=generator, dtype=torch.float64).z for _ in range(2))
    row = Row.of(icl.circuits(model, TASK))
    scores, values, foreign = row.scores(z, z), row.values(z), row.scores(z, other)
    assert_close(attend(scores, values, normaliser_of=scores), row.outputs(z))
    ratio = scores.exp().sum(-1, keepdim=True) / foreign.exp().sum(-1, keepdim=True)
    assert_close(attend(scores, values, normaliser_of=foreign), row.outputs(z) * ratio, rtol=1e-9)


def test_a_model_whose_forward_was_changed_is_refused(model, generator: torch.Generator) -> None:
    z, _ = TASK.sample(4, generator=generator, dtype=torch.float64)
    row = Row.of(icl.circuits(model, TASK))
    require_same_as_model(row, model, z)
    model.add_hook("blocks.0.attn.hook_z", lambda value, hook: 2 * value)
    with pytest.raises(ModelError, match="a hook changes its forward pass"):
        require_same_as_model(row, model, z)


def test_a_deeper_model_is_refused(generator: torch.Generator) -> None:
    z, _ = TASK.sample(4, generator=generator, dtype=torch.float64)
    model = icl.attention_only(TASK, 2, n_layers=2)
    row = Row.of(icl.circuits(icl.attention_only(TASK, 2), TASK))
    with pytest.raises(ModelError, match="2 layers"):
        require_same_as_model(row, model, z)
