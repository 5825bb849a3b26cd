"""Telling of a failure without stopping somebody's training."""

import logging
import warnings

_log = logging.getLogger(__name__)


def tell(message: str) -> None:
    """A warning; where warnings were made errors, a line in the log, because training must go on."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    except RuntimeWarning:
        _log.warning(message)
