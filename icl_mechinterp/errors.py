"""The mistakes a user can make, as exceptions that carry what the message needs.

Each message says what was wrong, what was given, and what to do. The command line prints the message alone and exits
with status 2; Python code gets the same text. Our own broken invariants are plain `assert`s, never these.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can mend; `str(error)` is the whole message."""


class ConfigError(UserError):
    """A value that cannot be used, with the dotted name of its field (`task.noise`).

    Attributes:
        field: the field's name as it stands in a config file or a call, or `None` when no single field is to blame.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def within(self, prefix: str) -> "ConfigError":
        """The same mistake, named from one level further out: `noise` within `task` is `task.noise`."""
        if self.field is None:
            return self
        message, field = str(self), f"{prefix}.{self.field}"
        if message.startswith(self.field):  # ours do; a word that only looks like the field is left alone
            message = field + message.removeprefix(self.field)
        return ConfigError(message, field=field)


class RunError(UserError):
    """A run folder or checkpoint that cannot be read or written as asked."""


class ModelError(UserError):
    """A model on which the question cannot be asked."""


class TrainingError(UserError):
    """Training stopped because going on would be worthless (a loss that is not a number)."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'noise'?"`, or an empty string when no choice resembles the word."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
