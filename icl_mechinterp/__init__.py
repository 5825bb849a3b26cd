"""Which algorithm did this model learn in context?

The public names are resolved on first use, so that importing the package imports no TransformerLens.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .circuits import Circuits as Circuits
    from .circuits import circuits as circuits
    from .errors import ConfigError as ConfigError
    from .errors import UserError as UserError
    from .experiment import ExperimentConfig as ExperimentConfig
    from .experiment import run as run
    from .experiment import train as train
    from .importing import export_weights as export_weights
    from .importing import import_weights as import_weights
    from .models import Coordinates as Coordinates
    from .models import attention_only as attention_only
    from .models import fit_coordinates as fit_coordinates
    from .probes import probe as probe
    from .results import HeadVerdict as HeadVerdict
    from .results import Measurement as Measurement
    from .results import ProbeReport as ProbeReport
    from .results import ProbeResult as ProbeResult
    from .runs import Run as Run
    from .runs import load_run as load_run
    from .session import Session as Session
    from .session import attach as attach
    from .tasks import Batch as Batch
    from .tasks import LinearRegression as LinearRegression

_HOME = {
    "Batch": "tasks",
    "Circuits": "circuits",
    "ConfigError": "errors",
    "Coordinates": "models",
    "ExperimentConfig": "experiment",
    "HeadVerdict": "results",
    "LinearRegression": "tasks",
    "Measurement": "results",
    "ProbeReport": "results",
    "ProbeResult": "results",
    "Run": "runs",
    "Session": "session",
    "UserError": "errors",
    "attach": "session",
    "attention_only": "models",
    "circuits": "circuits",
    "export_weights": "importing",
    "fit_coordinates": "models",
    "import_weights": "importing",
    "load_run": "runs",
    "probe": "probes",
    "run": "experiment",
    "train": "experiment",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "theory":
        return import_module(".theory", __name__)
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, "theory"])
