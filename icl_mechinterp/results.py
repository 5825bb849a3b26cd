"""Frozen records that cross borders: what a probe measured, what it concluded, and how both travel to JSON and back.

Records know no probe, no model and no plotting. A measurement judges itself against its threshold in one place
(`Measurement.judged`), so that "passed", "failed" and "undecided" mean the same everywhere.
"""

import html
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from .errors import RunError, UserError, nearest

SCHEMA_VERSION = 1
"""Of the JSON form of a report; a reader refuses newer ones."""

HeadLabel: TypeAlias = Literal["positive", "negative", "dummy", "mixed"]
Status: TypeAlias = Literal["passed", "failed", "undecided", "reported"]
Rule: TypeAlias = Literal["<", ">"]

_INTERVAL = 1.96  # standard errors in a two-sided 95 % interval


@dataclass(frozen=True)
class Measurement:
    """One number with its uncertainty and the verdict it leads to.

    Attributes:
        name: stable name, as in the table of measurements in the documentation.
        value: what was measured; `None` when the question cannot be asked of this model.
        stderr: standard error over prompts; `None` for structural values, which have none.
        threshold: the bound that decides; `None` for numbers that are only reported.
        rule: the side of the threshold that passes.
        passed: `True`, `False`, or `None` for undecided and for numbers that are only reported.
        reference: what theory or the literature gives for this number.
        unit: unit of value, threshold and reference.
        required: whether a model must pass this one to be called debiased gradient descent.
        reason: why the measurement is undecided.
        detail: further numbers behind the value (worst head, per-head values, sample size).
    """

    name: str
    value: float | None
    unit: str = "1"
    stderr: float | None = None
    threshold: float | None = None
    rule: Rule = "<"
    passed: bool | None = None
    reference: float | None = None
    required: bool = False
    reason: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.value is None or math.isfinite(self.value), f"{self.name}: {self.value} is not a measurement"
        object.__setattr__(self, "detail", MappingProxyType(dict(self.detail)))

    @classmethod
    def judged(
        cls,
        name: str,
        value: float,
        *,
        threshold: float,
        rule: Rule = "<",
        half_width: float = _INTERVAL,
        **rest: Any,
    ) -> "Measurement":
        """A measurement held against its threshold, interval included.

        With a standard error the whole interval must lie on one side; otherwise the sample is too small to tell. Its half
        width, in standard errors, is that of a 95 % interval, or larger where the sample is looked at repeatedly.
        A value that is not finite is undecided.
        """
        rest = {"required": True, "threshold": threshold, "rule": rule, **rest}
        if not math.isfinite(value):
            return cls.undecided(name, "the value is not a finite number", **rest)
        half = half_width * (rest.get("stderr") or 0.0)
        low, high = value - half, value + half
        if low < threshold <= high or low <= threshold < high:
            reason = f"the interval [{low:.3g}, {high:.3g}] contains the threshold {threshold:.3g}: draw more prompts"
            return cls(name, value, passed=None, reason=reason, **rest)
        return cls(name, value, passed=(high < threshold) if rule == "<" else (low > threshold), **rest)

    @classmethod
    def undecided(cls, name: str, reason: str, **rest: Any) -> "Measurement":
        """A question that cannot be answered for this model, and why."""
        return cls(name, None, reason=reason, **{"required": True, **rest, "stderr": None, "passed": None})

    @property
    def status(self) -> Status:
        """One of passed, failed, undecided, reported (a number without a threshold)."""
        if self.passed is not None:
            return "passed" if self.passed else "failed"
        return "undecided" if self.reason is not None else "reported"

    @property
    def text(self) -> str:
        """The value as a person reads it: `0.2443 ±0.0003`, or a dash."""
        if self.value is None:
            return "–"
        return f"{self.value:.4g}" if self.stderr is None else f"{self.value:.4g} ±{self.stderr:.1g}"

    def to_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _MEASUREMENT_FIELDS}, "detail": dict(self.detail)}


_MEASUREMENT_FIELDS = [name for name in Measurement.__dataclass_fields__ if name != "detail"]


@dataclass(frozen=True)
class HeadVerdict:
    """What one head became.

    Attributes:
        layer, head: where it is.
        label: positive (omega, mu > 0), negative (both < 0), dummy (share below the margin), mixed (signs opposed, or
            a diagonal of both signs).
        omega: mean diagonal of KQ on the covariates, the effective logit coefficient.
        mu: label entry of OV on the label read-out.
        share: |mu omega| over the sum of |mu omega|: the head's share of the effective step.
        margin: distance of the share from the threshold that would change the label.
    """

    layer: int
    head: int
    label: HeadLabel
    omega: float
    mu: float
    share: float
    margin: float

    @property
    def name(self) -> str:
        """`H1` in the first layer, `L2H1` in a later one."""
        return f"H{self.head}" if self.layer == 0 else f"L{self.layer}H{self.head}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ProbeResult(Mapping[str, Measurement]):
    """The measurements of one probe, by name."""

    probe: str
    measurements: tuple[Measurement, ...]

    def __getitem__(self, name: str) -> Measurement:
        for measurement in self.measurements:
            if measurement.name == name:
                return measurement
        names = [m.name for m in self.measurements]
        raise KeyError(f"probe '{self.probe}' has no measurement '{name}'; it has {', '.join(names)}.")

    def __iter__(self) -> Iterator[str]:
        return (m.name for m in self.measurements)

    def __len__(self) -> int:
        return len(self.measurements)


@dataclass(frozen=True)
class ProbeReport:
    """Everything the probes say about one model: `report["structure"]["zero_sum"].value`.

    Attributes:
        heads: one verdict per head; empty when no head reads the context labels directly.
        results: one `ProbeResult` per probe that ran.
        verdict: what the model is, or what it fails, in one sentence.
        algorithm: short name of what the model is: "debiased gradient descent", "kernel regressor", "none", "undecided".
        task, model: what was probed, as plain values.
        step, seed: where in a run; `None` for a model on its own.
        notes: remarks that decide nothing (a mixed head with one per cent of the mass).
    """

    heads: tuple[HeadVerdict, ...]
    results: tuple[ProbeResult, ...]
    verdict: str
    algorithm: str
    task: Mapping[str, Any]
    model: Mapping[str, Any]
    probe_seed: int
    step: int | None = None
    seed: int | None = None
    notes: tuple[str, ...] = ()

    def __getitem__(self, probe: str) -> ProbeResult:
        for result in self.results:
            if result.probe == probe:
                return result
        raise KeyError(f"no probe '{probe}' in this report; it has {', '.join(r.probe for r in self.results)}.")

    @property
    def measurements(self) -> tuple[tuple[str, Measurement], ...]:
        """Every measurement with the name of its probe."""
        return tuple((result.probe, m) for result in self.results for m in result.measurements)

    @property
    def passed(self) -> bool:
        """This model is debiased gradient descent: every required measurement passed, none is undecided."""
        required = [m for _, m in self.measurements if m.required]
        return bool(required) and all(m.passed is True for m in required)

    def with_status(self, status: Status) -> tuple[Measurement, ...]:
        """The required measurements with this status."""
        return tuple(m for _, m in self.measurements if m.required and m.status == status)

    def at(self, *, step: int, seed: int) -> "ProbeReport":
        """The same report, placed in a run."""
        return replace(self, step=step, seed=seed)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "algorithm": self.algorithm,
            "passed": self.passed,
            "step": self.step,
            "seed": self.seed,
            "probe_seed": self.probe_seed,
            "task": dict(self.task),
            "model": dict(self.model),
            "heads": [head.to_dict() for head in self.heads],
            "results": [
                {"probe": r.probe, "measurements": [m.to_dict() for m in r.measurements]} for r in self.results
            ],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """One line of strict JSON (no NaN)."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "ProbeReport":
        """The report that `to_dict` wrote.

        Raises:
            RunError: the record is of a newer schema, or lacks a field.
        """
        version = record.get("schema_version")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise RunError(
                f"the report has schema version {version!r}; this version of icl_mechinterp reads up to "
                f"{SCHEMA_VERSION}. Upgrade icl-mechinterp to read it."
            )
        try:
            return cls(
                heads=tuple(HeadVerdict(**head) for head in record["heads"]),
                results=tuple(
                    ProbeResult(r["probe"], tuple(Measurement(**m) for m in r["measurements"]))
                    for r in record["results"]
                ),
                **{name: record[name] for name in ("verdict", "algorithm", "task", "model", "step", "seed")},
                probe_seed=record["probe_seed"],
                notes=tuple(record["notes"]),
            )
        except (KeyError, TypeError) as error:
            raise RunError(f"the report is not one that icl_mechinterp wrote: {error}.") from error

    @classmethod
    def from_json(cls, text: str) -> "ProbeReport":
        return cls.from_dict(json.loads(text))

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per measurement."""
        import pandas as pd  # slow to import, and wanted in notebooks only

        return pd.DataFrame([{"probe": probe, "status": m.status, **m.to_dict()} for probe, m in self.measurements])

    def _repr_html_(self) -> str:
        """A plain escaped table for notebooks; makes no network call."""
        rows = "".join(
            "<tr>"
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in (probe, m.name, m.text, _bound(m), m.status))
            + "</tr>"
            for probe, m in self.measurements
        )
        heads = ", ".join(f"{h.name} {h.label} (omega {h.omega:+.3f}, mu {h.mu:+.3f})" for h in self.heads)
        return (
            f"<p><b>{html.escape(self.verdict)}</b></p><p>{html.escape(heads)}</p><table><thead><tr><th>probe</th>"
            f"<th>measurement</th><th>value</th><th>passes if</th><th>status</th></tr></thead><tbody>{rows}</tbody></table>"
        )


def _bound(measurement: Measurement) -> str:
    return "–" if measurement.threshold is None else f"{measurement.rule} {measurement.threshold:.4g}"


def select(report: ProbeReport, path: str) -> Measurement:
    """The measurement at `probe.name`, for the command line and for trackers.

    Raises:
        UserError: there is none of that name; the message has the nearest one.
    """
    by_path = {f"{probe}.{m.name}": m for probe, m in report.measurements}
    if path not in by_path:
        raise UserError(f"no measurement '{path}' in this report.{nearest(path, by_path)}")
    return by_path[path]
