"""The one error that building a kernel ends with. Torch-free."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


class BuildError(Exception):
    """What was to be built could not be.

    Attributes:
        reason: one sentence, with what to do where there is something.
        log: all that the compiler said; empty if it was not asked.
    """

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.log = log


def outcome_of(task: Callable[[], _Result]) -> _Result | BuildError:
    """The result of ``task``, or why there is none, whatever it failed with.

    An error that left here would keep the other ranks of the job waiting, who do without what could not be had.
    """
    try:
        return task()
    except BuildError as error:
        return error
    except Exception as error:
        said = str(error).strip().splitlines()
        return BuildError(f"{type(error).__name__}: {said[0] if said else 'no message'}", traceback.format_exc())
