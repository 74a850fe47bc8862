"""One call of the Python API: its context, its messages, and errors as the commands have them."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmctl.context import Context
from llmctl.errors import LlmctlError, UsageError, system_error
from llmctl.paths import TRAINER
from llmctl.terminal_text import printable

Answer = Callable[[str], str]
"""Answers a question of ssh, such as ``alice@login's password: ``."""


@dataclass
class Call:
    """A call in progress.

    Attributes:
        context: of this call.
        messages: what a command would have said on standard error.
    """

    context: Context
    messages: list[str] = field(default_factory=list)


@contextmanager
def calling(*words: str, answer: Answer | None = None) -> Iterator[Call]:
    """Begin a call; its connections are closed at the end.

    Each message also goes to the logger ``llmctl``, at level INFO.

    Args:
        words: name of the function, and its main argument, for the record of a run.
        answer: answers questions of ssh; without one, what needs an answer fails.

    Raises:
        LlmctlError: also for those errors of the operating system that commands explain.
    """
    _check_trainer()
    logger = logging.getLogger("llmctl")
    context = Context.of(words, (), dict(os.environ))
    call = Call(context)

    def tell(message: str) -> None:
        call.messages.append(printable(message))
        logger.info("%s", call.messages[-1])

    call.context = replace(context, tell=tell, asks=False, answer=answer)
    try:
        yield call
    except LlmctlError:
        raise
    except (OSError, RecursionError) as error:
        known = system_error(error)
        if known is None:
            raise
        raise known from error
    finally:
        call.context.close()


def _check_trainer() -> None:
    loaded = sys.modules.get("trainer")
    file = getattr(loaded, "__file__", None)
    if loaded is not None and (file is None or Path(file).resolve().parent != TRAINER):
        raise UsageError(
            f"a package trainer that is not llmctl's is imported already, from {file}; import llmctl.api before it"
        )


def plain(value: Any) -> Any:
    """A value as YAML has it: paths as text, tuples as lists, any mapping as a dictionary."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
