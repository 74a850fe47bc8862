"""Types of a profile's values, checked on construction."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from llmctl.site.job import VARIABLE, WORD, WORD_RULE, JobError, parse_time


def _seconds(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_time(value)
        except JobError as error:
            raise ValueError(error.problem) from None
    return value


def _variable_names(env: dict[str, str]) -> dict[str, str]:
    wrong = next((name for name in env if not VARIABLE.fullmatch(name)), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} cannot be the name of a variable")
    return env


def _word(value: str) -> str:
    if not WORD.fullmatch(value):
        raise ValueError(WORD_RULE)
    return value


Time = Annotated[int | None, BeforeValidator(_seconds)]
"""Seconds; files write them as ``H:M:S``."""
Variables = Annotated[dict[str, str], AfterValidator(_variable_names)]
"""Variable names and values."""
Word = Annotated[str, AfterValidator(_word)]
"""A name that a directive holds without quotes, as a job's own words."""
# pydantic's "$" matches at the end of the text only, unlike that of Python's re, which allows a newline there.
Line = Annotated[str, Field(pattern=r"^[^\x00\r\n]*$")]
"""One line of a job script, printed unchanged."""
SshName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]{0,254}$")]
"""A machine as the ssh command knows it; cannot be taken for an option of ssh."""
Interface = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,31}$")]
"""A network interface; cannot be taken for an option of ip."""
