"""Attached sessions for trainers that call back: Lightning and Hugging Face.

Both callbacks are duck-typed: they have the methods that the trainer calls and import nothing of it. `attach`'s options
go through them unchanged.
"""

from .huggingface import HuggingFaceCallback as HuggingFaceCallback
from .lightning import LightningCallback as LightningCallback
