"""Collect what is wrong with a job, so that one message lists all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from configs.reading.load import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


class Problems:
    """The problems that checks have found so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def attempt(self, check: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T | None:
        """Return what the check returns; keep the text of its ValueError and return None when it raises one."""
        try:
            return check(*arguments, **options)
        except ValueError as error:
            self.texts.append(str(error))
            return None

    def raise_all(self) -> None:
        """Raise one ConfigError that lists every problem, when there are any."""
        if len(self.texts) == 1:
            raise ConfigError(self.texts[0])
        if self.texts:
            raise ConfigError("\n  ".join([f"{len(self.texts)} problems", *self.texts]))
