"""An experiment from its config to its run folder: training, captures and probes joined."""

from .config import ExperimentConfig as ExperimentConfig
from .config import ModelConfig as ModelConfig
from .config import TrainingConfig as TrainingConfig
from .config import load_config as load_config
from .config import shipped_configs as shipped_configs
from .train import run as run
from .train import train as train
