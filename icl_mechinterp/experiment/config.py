"""The config of an experiment: what a YAML file may say, checked, with the nearest right key for a mistyped one."""

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from transformer_lens import HookedTransformer

from ..errors import ConfigError, nearest
from ..models import reason_not_fused
from ..probes import PROBES
from ..runs import build_model
from ..tasks import Task, task_from_dict
from ..training import Settings, resolve_seeds
from ..training.schedule import Schedule

# What a run's own config.yaml says beside the config, so that it can be trained from again
_PROVENANCE = ("schema_version", "versions", "git_revision")
# YAML 1.1 reads 1e-3 as a string, because it has no dot; every user means the number
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(_Section):
    """The arguments of `attention_only`."""

    n_heads: int = 2
    n_layers: int = 1
    d_head: int | None = None
    scale: float | None = None
    init: Literal["uniform", "normal"] = "uniform"
    init_scale: float = 1.0


class TrainingConfig(_Section):
    """The arguments of `train`."""

    steps: int = 40_000
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    schedule: Schedule = "constant"
    clip: float | None = None
    batch: int = 256
    engine: Literal["fused", "hooked"] = "fused"
    shared_prompts: bool = False
    threads: int | None = None
    every: int = 500
    checkpoint_every: int = 5_000
    evaluate: int = 0
    gradients: bool = False


class ExperimentConfig(_Section):
    """Everything that determines a run.

    Attributes:
        task: plain values of a task, `kind` included; checked when the config is made.
        model: the arguments of `attention_only`.
        training: the arguments of `train`.
        seeds: a number of seeds, or a list of them; they train together.
        probes: which probes are asked at the end; the cheap ones of them also at checkpoints.

    Raises:
        ConfigError: a value that cannot be used; `error.field` is its dotted name.
    """

    task: dict[str, Any]
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    seeds: int | list[int] = 1
    probes: list[str] = list(PROBES)

    @classmethod
    def from_dict(cls, values: Any) -> "ExperimentConfig":
        """A config from plain values, every part of it checked.

        Raises:
            ConfigError: with the dotted name of the field.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"a config is a mapping with the keys {', '.join(cls.model_fields)}; got {type(values).__name__}."
            )
        try:
            config = cls.model_validate(_with_numbers(dict(values)))
        except ValidationError as error:
            raise _as_config_error(error) from error
        config.check()
        return config

    def check(self) -> None:
        """Builds what the config describes, and throws it away.

        Raises:
            ConfigError: from whatever part refuses its values.
        """
        model = build_model(self.make_task(), self.model.model_dump(), seed=0)
        self.settings(1)
        resolve_seeds(self.seeds)
        self._require_probes()
        self.require_trainable(model)

    def _require_probes(self) -> None:
        for name in self.probes:  # now, not at the first checkpoint
            if name not in PROBES:
                raise ConfigError(
                    f"probes has '{name}', and there is no such probe; choose from {', '.join(PROBES)}."
                    f"{nearest(name, PROBES)}",
                    field="probes",
                )

    def require_trainable(self, model: HookedTransformer) -> None:
        """Checks that the training section can be carried out on a model, before a folder is created for it.

        Raises:
            ConfigError: an engine that cannot express the model, or gradients that cannot be recorded of it.
        """
        reason = reason_not_fused(model)
        if self.training.engine == "fused" and reason is not None:
            raise ConfigError(
                f"training.engine is 'fused', which cannot express this model: {reason}. Set training.engine to 'hooked'.",
                field="training.engine",
            )
        if self.training.gradients and model.cfg.n_layers > 1:
            raise ConfigError(
                f"training.gradients is for one-layer models; this one has {model.cfg.n_layers} layers. Leave it out.",
                field="training.gradients",
            )

    def make_task(self) -> Task:
        return task_from_dict(self.task)

    def make_models(self) -> list[HookedTransformer]:
        """One freshly initialised model per seed."""
        task, settings = self.make_task(), self.model.model_dump()
        return [build_model(task, settings, seed=seed) for seed in resolve_seeds(self.seeds)]

    def settings(self, threads: int) -> Settings:
        """The training section as the loop takes it."""
        values = self.training.model_dump()
        for name, least in (("every", 1), ("checkpoint_every", 1), ("evaluate", 0)):
            if values[name] < least:
                raise ConfigError(
                    f"training.{name} must be at least {least}; got {values[name]}.", field=f"training.{name}"
                )
        loop = {name: values[name] for name in Settings.__dataclass_fields__}
        try:
            return Settings(**{**loop, "threads": loop["threads"] or threads})
        except ConfigError as error:
            raise error.within("training") from error


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """A config from a file, or from the name of a shipped one, with `key=value` overrides.

    Args:
        source: path of a YAML file, or a name such as `two_head`.
        overrides: `task.d=8`, `model.n_heads=4`, `seeds=8`; values as YAML.

    Raises:
        ConfigError: missing, not YAML, not a mapping, an unknown or mistyped key, a wrong value.
    """
    values = {key: value for key, value in _read_yaml(_find(source)).items() if key not in _PROVENANCE}
    for override in overrides:
        _override(values, override)
    return ExperimentConfig.from_dict(values)


def shipped_configs() -> dict[str, Path]:
    """The configs that come with the package, by name."""
    folder = Path(str(resources.files("icl_mechinterp"))) / "configs"
    if not folder.is_dir():  # a checkout: the wheel has them inside the package
        folder = folder.parent.parent / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def _find(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; a config is a YAML file. Name the file.")
    shipped = shipped_configs()
    if str(source) in shipped:
        return shipped[str(source)]
    raise ConfigError(
        f"there is no config file {path}, and no shipped config of that name; shipped are {', '.join(shipped)}."
        f"{nearest(str(source), shipped)}"
    )


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}. Correct the file.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}). Name another config file.") from error
    if not isinstance(values, dict):
        kind = "empty" if values is None else f"a {type(values).__name__}"
        raise ConfigError(
            f"{path} must hold a mapping with the keys {', '.join(ExperimentConfig.model_fields)}; it is {kind}."
        )
    return values


def _override(values: dict[Any, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"an override is written key=value, as in task.d=8; got '{override}'.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {key} is not YAML: {text!r}. Quote it, or correct it.", field=key) from error
    *path, last = key.split(".")
    for part in path:
        if values.get(part) is None:  # left out, or a heading with nothing under it
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            raise ConfigError(
                f"{key} cannot be set: '{part}' is {values!r}, not a section of the config. Sections are task, model and "
                "training.",
                field=key,
            )
    values[last] = value


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_numbers(entry) for entry in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _as_config_error(error: ValidationError) -> ConfigError:
    """The first of pydantic's findings, in our words."""
    # a union reports one finding per branch, with the branch's name at the end of the location
    finding = error.errors()[0]
    path = [str(part) for part in finding["loc"]]
    if path[0] == "seeds":
        return ConfigError(
            f"seeds must be a number of seeds or a list of whole numbers; got {finding['input']!r}.", field="seeds"
        )
    field = ".".join(path)
    sections = {"model": ModelConfig, "training": TrainingConfig}
    if finding["type"] == "extra_forbidden":
        known = list(sections.get(path[0], ExperimentConfig).model_fields)
        return ConfigError(
            f"{field} is not a setting; known here are {', '.join(known)}.{nearest(path[-1], known)}", field=field
        )
    if finding["type"] == "missing":
        return ConfigError(f"{field} is missing; give it in the config.", field=field)
    if field in sections or field == "task":
        keys = f" with keys such as {', '.join(list(sections[field].model_fields)[:3])}" if field in sections else ""
        return ConfigError(f"{field} must be a section{keys}; got {finding['input']!r}.", field=field)
    wanted = _WANTED.get(finding["type"], finding["msg"].lower().removeprefix("input should be "))
    return ConfigError(f"{field} must be {wanted}; got {finding['input']!r}.", field=field)


_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a name",
    "list_type": "a list",
}
"""pydantic's findings by type, in our words; the others' own words follow `must be`."""
