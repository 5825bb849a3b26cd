"""Configs: what a file may say, and that every shipped one says it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from icl_mechinterp.errors import ConfigError
from icl_mechinterp.experiment import ExperimentConfig, load_config, shipped_configs

TASK = {"d": 2, "context": 4, "noise": 0.1}


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_config_is_valid_and_names_its_command(name: str) -> None:
    config = load_config(name)
    assert config.make_task().d > 0
    command = shipped_configs()[name].read_text().splitlines()[0]
    assert command.startswith("# icl-mechinterp ")
    assert name in command


def test_plain_values_and_back(tmp_path: Path) -> None:
    config = ExperimentConfig.from_dict({"task": TASK, "seeds": [3, 1], "training": {"steps": 7, "lr": 0.5}})
    assert ExperimentConfig.from_dict(config.model_dump()) == config
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config.model_dump()))
    assert load_config(tmp_path / "c.yaml") == config


def test_defaults_are_the_papers() -> None:
    config = ExperimentConfig.from_dict({"task": TASK})
    assert (config.model.n_heads, config.training.lr, config.training.batch) == (2, 1e-3, 256)
    assert (config.training.optimizer, config.training.schedule) == ("adam", "constant")
    assert len(config.make_models()) == 1


OVERRIDES: list[tuple[str, Any]] = [
    ("task.d=8", 8),
    ("task.noise=1e-1", 0.1),
    ("task.noise=5E-2", 0.05),
    ("task.noise=1", 1),
    ("task.covariance=[[1, 0], [0, 2e0]]", [[1, 0], [0, 2.0]]),
    ("task.covariance=null", None),
    ("model.n_heads=4", 4),
    ("model.d_head=5", 5),
    ("training.clip=1.0", 1.0),
    ("training.clip=", None),
    ("training.shared_prompts=true", True),
    ("training.optimizer=sgd", "sgd"),
    ("seeds=8", 8),
    ("seeds=[4, 2]", [4, 2]),
    ("probes=[structure]", ["structure"]),
]


@pytest.mark.parametrize(("override", "value"), OVERRIDES, ids=[text for text, _ in OVERRIDES])
def test_an_override(tmp_path: Path, override: str, value: Any) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"task": TASK}))
    found: Any = load_config(tmp_path / "c.yaml", [override]).model_dump()
    for part in override.partition("=")[0].split("."):
        found = found[part]
    assert found == value


def test_the_last_override_counts(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"task": TASK}))
    assert load_config(tmp_path / "c.yaml", ["seeds=2", "seeds=3"]).seeds == 3


def test_a_config_cannot_be_changed() -> None:
    config = ExperimentConfig.from_dict({"task": TASK})
    with pytest.raises(ValueError, match="frozen"):
        config.training.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_seeds_make_models_of_their_own() -> None:
    config = ExperimentConfig.from_dict({"task": TASK, "seeds": [5, 6]})
    one, two = config.make_models()
    (again,) = ExperimentConfig.from_dict({"task": TASK, "seeds": [6]}).make_models()
    weights = [model.blocks[0].attn.W_Q for model in (one, two, again)]
    assert not weights[0].equal(weights[1])
    assert weights[1].equal(weights[2])


def test_a_model_needs_the_engine_that_can_express_it() -> None:
    values = {"task": TASK, "model": {"n_layers": 2}}
    with pytest.raises(ConfigError, match="2 layers") as caught:
        ExperimentConfig.from_dict(values)
    assert caught.value.field == "training.engine"
    assert ExperimentConfig.from_dict({**values, "training": {"engine": "hooked"}}).model.n_layers == 2


def test_something_else_than_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"a config is a mapping with the keys task, model.*got list"):
        ExperimentConfig.from_dict([1, 2])
