"""One tool of the server: its arguments, its answer, and bounds of both."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from llmctl.errors import UsageError

MOST_CHARACTERS = 300_000
"""Of one answer, which a language model reads."""


class Arguments(BaseModel):
    """Arguments of a tool. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Answer:
    """The answer of a tool.

    Attributes:
        text: the gist in a sentence.
        document: plain values, with the names that ``--json`` prints.
    """

    text: str
    document: Mapping[str, Any]


@dataclass(frozen=True)
class Tool:
    """A tool.

    Attributes:
        name: of the command that does the same, where there is one.
        description: for the agent that chooses a tool.
        arguments: their names and types.
        call: takes the arguments; may be slow, and runs in a thread.
        writes: True if it changes runs or costs points.
        destroys: True if it ends what goes on.
    """

    name: str
    description: str
    arguments: type[Arguments]
    call: Callable[[Any], Answer]
    writes: bool = False
    destroys: bool = False


def checked(tool: Tool, values: Mapping[str, Any]) -> Arguments:
    """The arguments of a call.

    Raises:
        UsageError: all arguments that are unknown or not valid.
    """
    _check_text(tool.name, values)
    try:
        return tool.arguments.model_validate(dict(values))
    except ValidationError as error:
        problems = [_problem(tool, found["loc"], found["type"], found["msg"]) for found in error.errors()]
    raise UsageError("; ".join(dict.fromkeys(problems)))


def _problem(tool: Tool, place: tuple[int | str, ...], kind: str, words: str) -> str:
    name = ".".join(map(str, place))
    if kind == "extra_forbidden":
        return f"{tool.name}: has no argument {name!r}; its arguments are {', '.join(tool.arguments.model_fields)}"
    return f"{tool.name}: {name}: {words[:1].lower()}{words[1:]}"


def _check_text(name: str, value: Any) -> None:
    """Refuse what no command line can hold, and no file name has."""
    if isinstance(value, str) and any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in value):
        raise UsageError(f"{name}: {ascii(value)}: holds a character that no name or path has; leave it out")
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    for each in value if isinstance(value, list) else ():
        _check_text(name, each)
