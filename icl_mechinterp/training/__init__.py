"""Training of ensembles: the loop, its engines, and checkpoints that resume bit for bit."""

from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import latest_checkpoint as latest_checkpoint
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import remove_leftovers as remove_leftovers
from .checkpoint import save_checkpoint as save_checkpoint
from .checkpoint import saved_steps as saved_steps
from .checkpoint import step_of as step_of
from .checkpoint import write_atomically as write_atomically
from .ensemble import resolve_seeds as resolve_seeds
from .loop import Every as Every
from .loop import Interrupted as Interrupted
from .loop import NonFiniteLoss as NonFiniteLoss
from .loop import Settings as Settings
from .loop import TrainState as TrainState
from .loop import run_loop as run_loop
from .loop import start_state as start_state
from .schedule import SCHEDULES as SCHEDULES
from .schedule import learning_rate as learning_rate
