"""Key-query and output-value circuits: read from weights, captured while training, kept on disk.

`icl_mechinterp.circuits` is both this package and the function of the public API, because the import system binds a
subpackage's name in its parent: the module is made callable below, so `icl.circuits(model, task)` works before and
after anybody imports the package.
"""

import sys
from types import ModuleType
from typing import Any

from .capture import Capture as Capture
from .capture import Snapshot as Snapshot
from .extract import Circuits as Circuits
from .extract import circuits as circuits
from .trajectory import History as History
from .trajectory import read_group as read_group


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Circuits:
        return circuits(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
