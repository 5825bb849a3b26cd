"""The functional measurements against a second computation that shares nothing with the first.

Everything here is written out in numpy float64: the prompts and their generator, the softmax, the predictors, the search
for the best kernel. Both sides are Monte Carlo, so they are compared in their joint standard error; four of them leave
one false alarm in 16,000 comparisons, and the seeds are fixed.
"""

import time
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.optimize import minimize

import icl_mechinterp as icl
from icl_mechinterp.tasks import LinearRegression
from tests.planted import Heads, build, heads, sane_group, sane_pair

PROMPTS = 10_000
SIGMAS = 4.0

TASK = LinearRegression(5, 40, 0.1)
SHORT = LinearRegression(3, 15, 0.5, coefficient_scale=1.5)


def covariates_read() -> Heads:
    planted = sane_pair(SHORT)
    ov = planted.ov.clone()
    ov[0, 0, 0] += 0.3
    return planted.replaced(ov=ov)


def dense() -> Heads:
    planted = sane_group(TASK, [0.3, -0.5, 0.2])
    kq = planted.kq.clone()
    kq[0, 1, 3] += 0.06
    kq[1, 5, :5] += 0.02
    return planted.replaced(kq=kq)


MODELS = {
    "published-pair": (TASK, heads(5, [0.1258, -0.1265], [3.53, -3.50])),
    "one-kernel": (TASK, heads(5, [0.518], [1.494])),
    "dense-with-label-keys": (TASK, dense()),
    "covariates-read-short": (SHORT, covariates_read()),
}


@dataclass
class Sample:
    """Prompts with their predictions, all in numpy."""

    x: np.ndarray
    y: np.ndarray
    query: np.ndarray
    target: np.ndarray

    @classmethod
    def draw(cls, task: LinearRegression, prompts: int, rng: np.random.Generator) -> "Sample":
        x, query = rng.standard_normal((prompts, task.context, task.d)), rng.standard_normal((prompts, task.d))
        beta = rng.standard_normal((prompts, task.d)) * task.coefficient_scale / np.sqrt(task.d)
        y = np.einsum("nld,nd->nl", x, beta) + np.sqrt(task.noise) * rng.standard_normal((prompts, task.context))
        target = (query * beta).sum(1) + np.sqrt(task.noise) * rng.standard_normal(prompts)
        return cls(x, y, query, target)

    def moved(self, *, x: float = 0.0, y: float = 0.0) -> "Sample":
        return Sample(self.x + x, self.y + y, self.query, self.target)

    def model(self, planted: Heads) -> np.ndarray:
        z = np.concatenate([self.x, self.y[..., None]], -1)
        total = np.zeros(len(z))
        for kq, ov in zip(planted.kq.numpy(), planted.ov.numpy(), strict=True):
            total += (softmax(z @ kq[:, : self.x.shape[-1]] @ self.query[..., None]) * (z @ ov[0])).sum(1)
        return total

    def debiased_gd(self, step: float) -> np.ndarray:
        centred = self.x - self.x.mean(1, keepdims=True)
        return step / self.x.shape[1] * np.einsum("nl,nld,nd->n", self.y, centred, self.query)

    def gd(self, step: float) -> np.ndarray:
        return step / self.x.shape[1] * np.einsum("nl,nld,nd->n", self.y, self.x, self.query)

    def ridge(self, penalty: float) -> np.ndarray:
        gram = np.einsum("nld,nle->nde", self.x, self.x) + penalty * np.eye(self.x.shape[-1])
        return (np.linalg.solve(gram, np.einsum("nld,nl->nd", self.x, self.y)[..., None])[..., 0] * self.query).sum(1)

    def kernel(self, omega: float) -> np.ndarray:
        return (softmax(omega * self.x @ self.query[..., None]) * self.y).sum(1)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the context, of `[prompt context 1]`."""
    weights = np.exp(logits[..., 0] - logits[..., 0].max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def mean_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / np.sqrt(len(values)))


def ratio_error(squares: np.ndarray, prediction: np.ndarray, groups: int = 50) -> tuple[float, float]:
    """E(squares) / Var(prediction), its standard error from disjoint groups of prompts: no delta method here."""
    value = squares.mean() / prediction.var()
    parts = [
        part.mean() / other.var()
        for part, other in zip(np.split(squares, groups), np.split(prediction, groups), strict=True)
    ]
    return float(value), float(np.std(parts, ddof=1) / np.sqrt(groups))


@pytest.fixture(scope="module", params=list(MODELS), ids=list(MODELS))
def pair(request):
    """A report and the independent sample for the same model."""
    task, planted = MODELS[request.param]
    report = icl.probe(build(planted, task), task, prompts=PROMPTS, seed=3)
    return task, planted, report["equivalence"], Sample.draw(task, PROMPTS, np.random.default_rng(11))


def agree(measured, value: float, stderr: float) -> None:
    allowed = SIGMAS * np.hypot(measured.stderr, stderr) + 1e-9
    assert abs(measured.value - value) < allowed, (measured.name, measured.value, value, allowed)


def test_the_loss_agrees(pair):
    _, planted, measured, sample = pair
    value, stderr = mean_error((sample.target - sample.model(planted)) ** 2)
    agree(measured["loss"], value, stderr)
    # the control variate must gain something, and its standard error must be honest (the comparison above)
    assert measured["loss"].stderr < 1.05 * stderr


def test_distances_to_gradient_descent_and_ridge_agree(pair):
    task, planted, measured, sample = pair
    yhat = sample.model(planted)
    step = float((planted.kq[:, range(task.d), range(task.d)].mean(1) * planted.ov[:, 0, task.d]).sum())
    penalty = task.d * task.noise / task.coefficient_scale**2
    others = {"debiased_gd": sample.debiased_gd(step), "gd": sample.gd(step), "ridge": sample.ridge(penalty)}
    for name, other in others.items():
        agree(measured[f"distance_{name}"], *ratio_error((yhat - other) ** 2, yhat))


def test_distance_to_the_best_kernel_agrees(pair):
    """The kernel is searched here by another method, on these prompts, from several starts."""
    _, planted, measured, sample = pair
    yhat = sample.model(planted)
    first = Sample(*(part[:2000] for part in (sample.x, sample.y, sample.query, sample.target)))
    goal = first.model(planted)

    def gap(parameters):
        return ((goal - parameters[1] * first.kernel(parameters[0])) ** 2).mean()

    starts = [(sign * size, sign) for sign in (-1, 1) for size in (0.1, 0.6)]
    best = min((minimize(gap, s, method="Nelder-Mead", options={"maxiter": 60}) for s in starts), key=lambda f: f.fun)
    value, stderr = ratio_error((yhat - best.x[1] * sample.kernel(best.x[0])) ** 2, yhat)
    # each fit is off by its own sampling error, which is second order in the distance: a thousandth is ample
    assert (
        abs(measured["distance_nadaraya_watson"].value - value)
        < SIGMAS * np.hypot(measured["distance_nadaraya_watson"].stderr, stderr) + 1e-3
    )


def test_shifts_agree(pair):
    _, planted, measured, sample = pair
    yhat = sample.model(planted)
    for name, by in (("shift_covariates", {"x": 1.0}), ("shift_labels", {"y": 1.0})):
        moved = sample.moved(**by).model(planted)
        agree(measured[name], *ratio_error((moved - yhat) ** 2, yhat))


def test_a_seed_gives_one_report_and_another_seed_another():
    model = build(sane_pair(TASK), TASK)
    first, again, other = (icl.probe(model, TASK, prompts=1000, seed=seed).to_dict() for seed in (0, 0, 1))
    assert first == again
    assert first["results"][1] != other["results"][1]
    assert first["results"][0] == other["results"][0]  # structure draws nothing


@pytest.mark.slow
def test_estimates_scatter_as_their_standard_errors_say():
    """Over 40 seeds, (estimate - mean) / stderr has a variance near one: chi^2 with 39 degrees, three-sigma band."""
    task, planted = MODELS["published-pair"]
    model = build(planted, task)
    reports = [icl.probe(model, task, prompts=500, probes=["equivalence"], seed=seed) for seed in range(40)]
    for name in ("loss", "distance_debiased_gd", "distance_ridge", "shift_labels"):
        measured = [report["equivalence"][name] for report in reports]
        values, errors = np.array([m.value for m in measured]), np.array([m.stderr for m in measured])
        ratio = values.var(ddof=1) / (errors**2).mean()
        assert abs(ratio - 1) < 3 * np.sqrt(2 / 39) + 0.15, (name, ratio)  # heavy tails of squares add a little


@pytest.mark.slow
def test_the_default_probe_takes_seconds():
    model = build(sane_pair(TASK), TASK)
    start = time.perf_counter()
    report = icl.probe(model, TASK)
    assert time.perf_counter() - start < 10
    assert report["equivalence"]["loss"].stderr < 3e-4  # what 100,000 prompts with the control variate give
