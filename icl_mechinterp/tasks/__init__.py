"""Who draws the prompts."""

from ._protocol import Batch as Batch
from ._protocol import Task as Task
from .linear import LinearRegression as LinearRegression
from .randomness import generator_for as generator_for
from .resolve import task_from_dict as task_from_dict
from .stream import PromptStream as PromptStream
