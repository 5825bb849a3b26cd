"""The command line: thin commands over the Python API. This is where the parts are put together."""

from .import_ import import_ as import_
from .main import app as app
from .main import main as main
