"""Patches of the query's row against hooks on the model, against predictions of theory, and as identities."""

import json

import pytest
import torch

import icl_mechinterp as icl
from icl_mechinterp import theory
from icl_mechinterp.errors import ConfigError
from icl_mechinterp.probes import classify
from icl_mechinterp.probes.patching import PAIRS, Pair, Runs, make_pair, patch, patched, patching, path_shares
from icl_mechinterp.probes.row import Row, row_or_reason
from icl_mechinterp.tasks import generator_for
from tests.helpers import assert_close, within_stderr
from tests.planted import Heads, build, heads, sane_group, sane_pair

TASK = icl.LinearRegression(d=3, context=7, noise=0.1)
PATHS = ("query", "key", "value", "scores", "pattern", "output")


def row_of(model, task=TASK) -> Row:
    return Row.of(icl.circuits(model, task))


def planted_runs(planted: Heads, pair: Pair, task=TASK) -> tuple[Runs, Runs]:
    """Of the model and of its idealised heads."""
    model = build(planted, task, dtype=torch.float64)
    found = icl.circuits(model, task)
    return Runs(Row.of(found), pair), Runs(Row.ideal(classify(found), task.d), pair)


def pair_of(name: str, *, prompts: int = 400, task=TASK) -> Pair:
    generator = generator_for(3, "probe")
    batch = task.sample(prompts, generator=generator, dtype=torch.float64)
    return make_pair(name, batch, task, generator)


def result_of(model, task=TASK, **options):
    found = icl.circuits(model, task)
    heads = classify(found)
    few = task.sample(32, generator=generator_for(0, "fit"), dtype=torch.float64).z
    return patching(row_or_reason(model, found, heads, few), heads, task, **{"prompts": 500, **options})


@pytest.fixture(scope="module")
def model():
    """Untrained, so that nothing about its matrices is special."""
    return icl.attention_only(TASK, 3, seed=2).double()


@pytest.fixture(scope="module")
def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """A receiver and an unrelated donor."""
    generator = torch.Generator().manual_seed(5)
    first, second = (TASK.sample(6, generator=generator, dtype=torch.float64).z for _ in range(2))
    return first, second


# --- one patch --------------------------------------------------------------------------------------------------------


def with_hooks(model, receiver, donor, path: str, chosen: list[int], positions: list[int] | None) -> torch.Tensor:
    """The same patch written out with TransformerLens' own hooks, at the query's row."""
    names = {"query": "q", "key": "k", "value": "v", "scores": "attn_scores", "pattern": "pattern", "output": "z"}
    name = f"blocks.0.attn.hook_{names[path]}"
    _, cache = model.run_with_cache(donor, start_at_layer=0)
    tokens = range(receiver.shape[1] - 1) if positions is None else positions

    def edit(value, hook):
        value = value.clone()
        for head in chosen:
            if path in ("query", "output"):
                value[:, -1, head] = cache[name][:, -1, head]
            for token in tokens:
                if path in ("key", "value"):
                    value[:, token, head] = cache[name][:, token, head]
                if path in ("scores", "pattern"):
                    value[:, head, -1, token] = cache[name][:, head, -1, token]
        return value

    with torch.no_grad():
        return model.run_with_hooks(receiver, start_at_layer=0, fwd_hooks=[(name, edit)])[:, -1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chosen", [[1], [0, 2], [0, 1, 2]])
def test_a_patch_is_what_hooks_on_the_model_do(model, prompts, path, chosen):
    found = patched(row_of(model), *prompts, path, heads=chosen)
    assert_close(found, with_hooks(model, *prompts, path, chosen, None), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("path", ["key", "value", "scores", "pattern"])
def test_a_patch_of_some_positions_is_what_hooks_do(model, prompts, path):
    found = patched(row_of(model), *prompts, path, heads=[1, 2], positions=[0, 4])
    assert_close(found, with_hooks(model, *prompts, path, [1, 2], [0, 4]), rtol=1e-9, atol=1e-12)


def test_scores_and_pattern_differ_only_when_some_positions_are_patched(model, prompts):
    row = row_of(model)
    assert_close(patched(row, *prompts, "scores"), patched(row, *prompts, "pattern"), rtol=1e-9, atol=1e-12)
    some = (patched(row, *prompts, path, positions=[2]) for path in ("scores", "pattern"))
    assert float(torch.sub(*some).abs().min()) > 1e-6


@pytest.mark.parametrize("path", PATHS)
def test_patching_no_head_gives_the_receiver(model, prompts, path):
    row = row_of(model)
    assert_close(patched(row, *prompts, path, heads=[]), row.predict(prompts[0]), rtol=1e-12, atol=1e-15)


def test_patching_all_outputs_gives_the_donor_exactly(model, prompts):
    row = row_of(model)
    assert torch.equal(patched(row, *prompts, "output"), row.predict(prompts[1]))


def test_positions_of_an_output_and_prompts_of_two_lengths_are_refused(model, prompts):
    row = row_of(model)
    with pytest.raises(ConfigError, match="head's output, which has none") as caught:
        patched(row, *prompts, "output", positions=[1])
    assert caught.value.field == "positions"
    with pytest.raises(ConfigError, match=r"one shape.*\(6, 8, 4\) and \(6, 6, 4\)"):
        patched(row, prompts[0], prompts[1][:, 2:], "value")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("direction", ["noising", "denoising"])
def test_cached_runs_give_the_same_patches(model, prompts, path, direction):
    pair = Pair("mine", *prompts, torch.zeros(6, 1, dtype=torch.float64))
    row = row_of(model)
    found = Runs(row, pair).patched(path, [0, 2], direction)
    assert_close(found, patched(row, *pair.ends(direction), path, heads=[0, 2]), rtol=1e-9, atol=1e-12)


# --- directions and metrics -------------------------------------------------------------------------------------------


def test_the_direction_says_who_receives():
    """Noising some heads is denoising the others; all heads, and the loss is all lost or all restored."""
    runs, ideal = planted_runs(sane_group(TASK, [0.5, -0.2, -0.3], gamma=0.3), pair_of("other_prompt"))
    assert torch.equal(runs.patched("output", [0, 1], "noising"), runs.patched("output", [2], "denoising"))
    noised, denoised = (patch(runs, ideal, "output", direction=name) for name in ("noising", "denoising"))
    assert noised.metrics.restored == pytest.approx(0, abs=1e-12)
    assert denoised.metrics.restored == pytest.approx(1, abs=1e-12)
    assert noised.direction == "noising"
    nothing = patch(runs, ideal, "output", heads=[], direction="denoising")
    assert nothing.metrics.change == 0
    assert nothing.metrics.restored == 0


def test_metrics_are_their_formulas():
    runs, ideal = planted_runs(sane_pair(TASK, gamma=0.4), pair_of("other_prompt"))
    pair, found = runs.pair, patch(runs, ideal, "value", heads=[1], direction="denoising").metrics
    clean, corrupted = runs.row.predict(pair.clean), runs.row.predict(pair.corrupted)
    now = patched(runs.row, pair.corrupted, pair.clean, "value", heads=[1])
    assert found.change == pytest.approx(float((now - corrupted).square().mean() / clean.var(correction=0)), rel=1e-9)
    losses = [float((pair.target - yhat).square().mean()) for yhat in (clean, corrupted, now)]
    assert found.restored == pytest.approx((losses[1] - losses[2]) / (losses[1] - losses[0]), rel=1e-9)


def test_a_share_of_a_loss_that_does_not_move_is_not_given():
    runs, ideal = planted_runs(sane_pair(TASK), pair_of("covariates_shifted"))
    assert patch(runs, ideal, "output").metrics.restored is None


# --- pairs whose patched output theory knows --------------------------------------------------------------------------


def test_shifted_covariates_do_not_move_a_planted_model():
    runs, _ = planted_runs(sane_pair(TASK), pair_of("covariates_shifted"))
    assert float(runs.total.abs().max()) < 1e-10


def test_shifted_covariates_move_the_prediction_by_what_ov_reads_of_them():
    """Scores move by a constant, which softmax ignores; values by sum_i OV[y, x_i], and the pattern sums to one."""
    planted = sane_pair(TASK)
    ov = planted.ov.clone()
    ov[:, 0, :3] = torch.tensor([[0.5, -0.2, 0.1], [0.05, 0.3, -0.6]], dtype=torch.float64)
    runs, ideal = planted_runs(planted.replaced(ov=ov), pair_of("covariates_shifted"))
    assert_close(runs.total, torch.full_like(runs.total, 0.4 - 0.25), rtol=0, atol=1e-10)
    assert patch(runs, ideal, "key").metrics.change < 1e-20
    assert not patch(runs, ideal, "output", heads=[0]).agrees


def test_shifted_labels_move_a_head_by_its_mu_and_the_model_by_their_sum():
    runs, _ = planted_runs(heads(3, [0.2, -0.1], [2.0, -1.5]), pair_of("labels_shifted"))
    effects = runs.corrupted - runs.clean
    expected = torch.tensor([[2.0], [-1.5]]).double().expand_as(effects)
    assert_close(effects, expected, rtol=0, atol=1e-10)


def test_other_coefficients_arrive_through_the_values_alone():
    """The pair differs by labels delta^T x, on which the prediction is what the same heads make of them."""
    pair = pair_of("other_beta")
    assert torch.equal(pair.clean[..., :3], pair.corrupted[..., :3])
    runs, ideal = planted_runs(sane_pair(TASK), pair)
    difference = pair.clean.clone()
    difference[..., 3:] = pair.corrupted[..., 3:] - pair.clean[..., 3:]
    gamma, mu = abs(float(runs.row.kq[0, 0, 0])), abs(float(runs.row.ov[0, 0, 3]))
    expected = theory.nadaraya_watson(difference, [gamma, -gamma], [mu, -mu])
    assert_close(runs.total, expected, rtol=1e-6, atol=1e-9)
    for path in ("query", "key", "scores"):
        assert patch(runs, ideal, path).metrics.change < 1e-20
    assert patch(runs, ideal, "value").metrics.change == pytest.approx(patch(runs, ideal, "output").metrics.change)
    slopes = difference[:, :-1, 3:]  # they are linear in the covariates, with another delta per prompt
    fit = torch.linalg.lstsq(difference[:, :-1, :3], slopes).solution
    assert_close(difference[:, :-1, :3] @ fit, slopes, rtol=1e-6, atol=1e-9)


def test_another_query_arrives_through_the_query_alone():
    runs, ideal = planted_runs(sane_pair(TASK), pair_of("other_query"))
    assert patch(runs, ideal, "key").metrics.change == 0
    assert patch(runs, ideal, "value").metrics.change == 0
    assert patch(runs, ideal, "query").metrics.change == patch(runs, ideal, "output").metrics.change > 1


def test_one_moved_example_moves_one_token():
    pair = pair_of("example_moved")
    assert torch.equal(pair.clean[:, 1:], pair.corrupted[:, 1:])
    assert_close(pair.corrupted[:, 0, :3], pair.clean[:, 0, :3] + 1, rtol=1e-12)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("path", ["query", "key", "value", "scores", "output"])
def test_a_planted_pair_moves_like_debiased_gd(name, path):
    """gamma sqrt(d) = 0.02: softmax is linear to 2 %, and every path is the same swap of gradient descent's inputs."""
    planted = sane_pair(TASK, gamma=0.02 / 3**0.5)
    runs, ideal = planted_runs(planted, pair_of(name))
    step = 2 * float(planted.kq[0, 0, 0] * planted.ov[0, 0, 3])
    found = patch(runs, ideal, path, step=step)
    assert found.agrees
    assert found.metrics.change == pytest.approx(found.debiased_gd_change, rel=0.05, abs=1e-9)
    assert found.predicted.change == pytest.approx(found.metrics.change, rel=1e-6, abs=1e-15)


def test_debiased_gd_is_compared_only_where_all_heads_are_patched():
    runs, ideal = planted_runs(sane_pair(TASK), pair_of("other_query"))
    assert patch(runs, ideal, "output", heads=[0], step=0.5).debiased_gd_change is None


def test_an_unknown_pair_is_refused():
    with pytest.raises(ConfigError, match=r"no pair 'sideways'.*other_query"):
        pair_of("sideways")


# --- paths ------------------------------------------------------------------------------------------------------------


def test_sources_and_interactions_add_up_exactly(model, prompts):
    runs = Runs(row_of(model), Pair("mine", *prompts, torch.zeros(6, 1, dtype=torch.float64)))
    assert len(runs.interactions) == 7
    assert_close(sum(runs.interactions.values()), runs.corrupted - runs.clean, rtol=1e-9, atol=1e-13)


def test_an_interaction_is_what_two_sources_do_beyond_each(model, prompts):
    row = row_of(model)
    runs = Runs(row, Pair("mine", *prompts, torch.zeros(6, 1, dtype=torch.float64)))
    own, query, value = (
        patched(row, *prompts, path, heads=chosen) for path, chosen in (("query", []), ("query", [1]), ("value", [1]))
    )
    mixed = prompts[1].clone()
    mixed[:, :-1] = prompts[0][:, :-1]  # the donor's query on the receiver's context
    both = patched(row, prompts[0], prompts[1], "value", heads=[1])
    assert_close(runs.interactions["query"][:, 1], query - own, rtol=1e-9, atol=1e-13)
    assert_close(both, value, rtol=0)
    with_query = patched(row, mixed, prompts[1], "value", heads=[1]) - row.predict(mixed)  # value's effect under it
    expected = with_query - (value - own)
    assert_close(runs.interactions["query value"][:, 1], expected, rtol=1e-9, atol=1e-13)


def test_flat_heads_have_only_a_value_path():
    runs, ideal = planted_runs(heads(3, [0.0], [1.0]), pair_of("other_prompt"))
    shares = {share.path: share.share for share in path_shares(runs, ideal)}
    assert shares == pytest.approx({**dict.fromkeys(shares, 0.0), "output": 1.0, "value": 1.0}, abs=1e-12)


def test_shares_of_paths_sum_to_one():
    runs, ideal = planted_runs(sane_group(TASK, [0.5, -0.4, -0.1], gamma=0.3), pair_of("other_prompt"))
    shares = path_shares(runs, ideal)
    assert sum(share.share for share in shares if share.path == "output") == pytest.approx(1, abs=1e-12)
    assert sum(share.share for share in shares if share.path != "output") == pytest.approx(1, abs=1e-12)
    assert all(share.share == pytest.approx(share.predicted, abs=1e-9) for share in shares)


# --- the measurements -------------------------------------------------------------------------------------------------


def test_a_planted_pair_passes_everything():
    result = result_of(build(sane_pair(TASK), TASK), prompts=2000)
    assert {name: m.passed for name, m in result.items()} == dict.fromkeys(result, True)
    paths, share = result["path_sum_gap"].detail, result["head_loss_share"]
    assert paths["agree"] == paths["of"]
    assert share.value < 1e-4
    assert share.detail["sum"] == pytest.approx(1, abs=1e-12)
    for head in share.detail["per_head"].values():  # the two heads are mirror images
        within_stderr(head["share"], 0.5, head["stderr"])


def test_loss_shares_are_their_formula(model):
    planted = sane_group(TASK, [0.5, -0.4, -0.1], gamma=0.3)
    result = result_of(build(planted, TASK, dtype=torch.float64))
    z, target = TASK.sample(500, generator=generator_for(0, "probe"), dtype=torch.float64)
    kernels = [
        theory.nadaraya_watson(z, kq[0, 0].item(), ov[0, 3].item())
        for kq, ov in zip(planted.kq, planted.ov, strict=True)
    ]
    yhat = sum(kernels)
    explained = float(target.square().mean() - (target - yhat).square().mean())
    for kernel, head in zip(kernels, result["head_loss_share"].detail["per_head"].values(), strict=True):
        expected = float((kernel * (2 * target - yhat)).mean()) / explained
        assert head["share"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_path_effects_sum_up_for_any_model(seed):
    measured = result_of(icl.attention_only(TASK, 4, seed=seed, init_scale=2.0))["path_sum_gap"]
    assert measured.passed
    assert measured.value < 1e-12


def test_a_total_effect_that_is_another_is_found(monkeypatch):
    """The total comes from another engine than the path effects; if the two parted, the measurement says so."""
    module = __import__("sys").modules["icl_mechinterp.probes.patching"]
    original = module.other_engine

    def slightly_off(row):
        predict = original(row)
        return lambda z: predict(z) * (1 + 1e-4)

    monkeypatch.setattr(module, "other_engine", slightly_off)
    assert result_of(build(sane_pair(TASK), TASK))["path_sum_gap"].passed is False


def test_a_head_that_is_not_its_diagonal_shows_in_its_share():
    planted = sane_pair(TASK, gamma=0.3)
    kq = planted.kq.clone()
    kq[0, :3, :3] += 0.4 * (torch.ones(3, 3) - torch.eye(3))
    result = result_of(build(planted.replaced(kq=kq), TASK), prompts=2000)
    assert result["head_loss_share"].passed is False
    assert result["head_loss_share"].detail["worst_head"] == "H0"
    assert result["path_sum_gap"].passed
    assert result["path_sum_gap"].detail["agree"] < result["path_sum_gap"].detail["of"]


def test_a_model_that_explains_nothing_has_nothing_to_share():
    result = result_of(build(sane_pair(TASK, step=-1.0), TASK))
    assert result["head_loss_share"].status == "undecided"
    assert "explain none" in result["head_loss_share"].reason
    assert result["path_sum_gap"].passed


def test_covariates_with_a_covariance_leave_the_sum_decided():
    task = icl.LinearRegression(3, 7, 0.1, covariance=torch.diag(torch.tensor([1.0, 2.0, 3.0])))
    result = result_of(build(sane_pair(task), task), task)
    assert result["path_sum_gap"].passed
    assert result["head_loss_share"].status == "undecided"


@pytest.mark.parametrize("case", ["deeper", "constant", "bypassed"])
def test_what_cannot_be_asked_is_undecided(case):
    if case == "deeper":
        model, words = icl.attention_only(TASK, 2, n_layers=2), "2 layers"
    elif case == "constant":
        model, words = build(heads(3, [0.3, -0.3], [0.0, 0.0]), TASK), "constant"
    else:
        model, words = build(sane_pair(TASK), TASK), "a hook changes its forward pass"
        model.add_hook("blocks.0.attn.hook_z", lambda value, hook: value.roll(1, 0))
    for measurement in result_of(model).values():
        assert measurement.status == "undecided"
        assert measurement.required
        assert words in measurement.reason


def test_the_details_are_plain_values_and_a_seed_decides_them():
    model = build(sane_pair(TASK, gamma=0.3), TASK)
    first, again, other = (result_of(model, prompts=200, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    text = json.dumps([m.to_dict() for m in first.values()], allow_nan=False)
    assert json.loads(text) == [m.to_dict() for m in first.values()]
    rows = first["path_sum_gap"].detail["patches"]
    assert {row["pair"] for row in rows} == set(PAIRS)
    assert {row["direction"] for row in rows} == {"noising", "denoising"}
