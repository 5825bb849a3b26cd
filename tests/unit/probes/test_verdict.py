"""The sentence and the algorithm, from measurements made up for the purpose."""

import pytest

from icl_mechinterp.probes import THRESHOLDS
from icl_mechinterp.probes.verdict import conclude
from icl_mechinterp.results import HeadVerdict, Measurement, ProbeResult

PAIR = (
    HeadVerdict(0, 0, "positive", 0.1, 4.4, 0.5, 0.495),
    HeadVerdict(0, 1, "negative", -0.1, -4.4, 0.5, 0.495),
)
KERNEL = {"kernel_omega": 0.52, "kernel_mu": 1.49}


def results(
    *, structural: dict | None = None, functional: dict | None = None, kernel: float = 0.19
) -> list[ProbeResult]:
    """A model that passes everything, but for the measurements given by name (`None`: undecided)."""

    def judged(values: dict) -> list[Measurement]:
        return [
            Measurement.undecided(name, "cannot be asked", threshold=0.03)
            if value is None
            else Measurement.judged(name, value, threshold=0.03)
            for name, value in values.items()
        ]

    structure = judged({"zero_sum": 0.001, "manifold_gap": 0.002} | (structural or {}))
    distance = judged({"loss": 0.01, "distance_debiased_gd": 0.001} | (functional or {}))
    nearest = Measurement(
        "distance_nadaraya_watson", kernel, threshold=0.1, rule=">", passed=kernel > 0.1, required=True, detail=KERNEL
    )
    step = Measurement("effective_step", 0.884, reference=0.879)
    return [ProbeResult("structure", (*structure, step)), ProbeResult("equivalence", (*distance, nearest))]


def conclusion(heads=PAIR, **rest):
    return conclude(heads, results(**rest), THRESHOLDS)


def test_everything_passed():
    verdict = conclusion()
    assert verdict.algorithm == "debiased gradient descent"
    for part in (
        "is debiased gradient descent",
        "2 heads: 1 positive, 1 negative",
        "effective step 0.884, theory 0.879",
    ):
        assert part in verdict.sentence
    assert verdict.notes == ()


def test_function_without_structure_is_said_side_by_side():
    verdict = conclusion(structural={"zero_sum": 0.2})
    assert verdict.algorithm == "debiased gradient descent"
    for part in ("computes debiased gradient descent", "not with the structure", "fails zero_sum (0.2, needs < 0.03)"):
        assert part in verdict.sentence


def test_another_function_is_none_of_the_named():
    verdict = conclusion(functional={"distance_debiased_gd": 0.4})
    assert verdict.algorithm == "none"
    for part in (
        "has the structure of debiased gradient descent, but does not compute it",
        "it fails distance_debiased_gd (0.4, needs < 0.03)",
    ):
        assert part in verdict.sentence


def test_neither_structure_nor_function():
    verdict = conclusion(structural={"zero_sum": 0.2}, functional={"distance_debiased_gd": 0.4})
    assert verdict.algorithm == "none"
    assert "is not debiased gradient descent: it fails zero_sum (0.2" in verdict.sentence


@pytest.mark.parametrize(
    ("normaliser", "structural", "functional", "algorithm", "says"),
    [
        (0.9, {}, {}, "debiased gradient descent", "This model is debiased gradient descent ("),
        (0.2, {}, {}, "debiased gradient descent", "interventions contradict it: it fails normaliser (0.2, needs > 0.5)"),
        (0.2, {"zero_sum": 0.2}, {}, "debiased gradient descent", "structure of the theory and interventions contradict it"),
        (0.9, {"zero_sum": 0.2}, {"loss": 0.4}, "none", "reacts to interventions like it, but does not compute it"),
        (None, {}, {}, "undecided", "leaves normaliser undecided (no circuits)"),
    ],
)  # fmt: skip
def test_evidence_that_contradicts_is_named_and_not_averaged(normaliser, structural, functional, algorithm, says):
    caused = (
        Measurement.undecided("normaliser", "no circuits", threshold=0.5, rule=">")
        if normaliser is None
        else Measurement.judged("normaliser", normaliser, threshold=0.5, rule=">")
    )
    evidence = [*results(structural=structural, functional=functional), ProbeResult("interchange", (caused,))]
    verdict = conclude(PAIR, evidence, THRESHOLDS)
    assert verdict.algorithm == algorithm
    assert says in verdict.sentence


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (("positive",), ", a single head ("),
        (("negative", "dummy"), ", a single head ("),
        (("negative", "negative"), ", heads of one sign ("),
        (("positive", "negative"), "regressor ("),
        (("mixed", "mixed"), "regressor ("),
    ],
)
def test_a_kernel_regressor_says_what_its_heads_are(labels, says):
    heads = tuple(HeadVerdict(0, h, label, 0.1, 1.0, 0.5, 0.1) for h, label in enumerate(labels))
    verdict = conclusion(heads, kernel=0.001, functional={"distance_debiased_gd": 0.2})
    assert verdict.algorithm == "kernel regressor"
    for part in (says, "omega +0.520, mu +1.490", "not debiased gradient descent"):
        assert part in verdict.sentence


def test_a_kernel_that_is_nearest_but_not_near_names_nothing():
    kernel = 2 * THRESHOLDS.kernel_distance
    assert conclusion(kernel=kernel, functional={"distance_debiased_gd": 0.2}).algorithm == "none"


@pytest.mark.parametrize(
    "missing", [{"structural": {"manifold_gap": None}}, {"functional": {"loss": None}}], ids=["structure", "function"]
)
def test_undecided_with_nothing_failed_stays_undecided(missing):
    verdict = conclusion(**missing)
    assert verdict.algorithm == "undecided"
    for part in ("Undecided", "undecided (cannot be asked)"):
        assert part in verdict.sentence


def test_several_undecided_are_counted():
    verdict = conclusion(structural={"zero_sum": None, "manifold_gap": None}, functional={"loss": None})
    assert "zero_sum and 2 more undecided" in verdict.sentence


@pytest.mark.parametrize(
    ("value", "says"), [(0.001, "has the structure of debiased gradient descent"), (0.2, "fails zero_sum")]
)
def test_weights_alone_decide_no_algorithm(value, says):
    verdict = conclude(PAIR, results(structural={"zero_sum": value})[:1], THRESHOLDS)
    assert verdict.algorithm == "undecided"
    for part in ("By its weights alone", says):
        assert part in verdict.sentence


@pytest.mark.parametrize(("rule", "value", "worst"), [("<", 0.01, 0.2), (">", 0.05, 0.01)])
def test_a_small_head_that_departs_is_noted(rule, value, worst):
    detail = {"worst_head": "H2", "worst": worst, "worst_share": 0.012}
    departing = Measurement.judged("off_diagonal_energy", value, threshold=0.03, rule=rule, detail=detail)
    verdict = conclude(PAIR, [ProbeResult("structure", (departing,))], THRESHOLDS)
    assert len(verdict.notes) == 1
    for part in ("H2", "off_diagonal_energy", f"{worst:.3g}", "0.03", "1.2% of the mass"):
        assert part in verdict.notes[0]
