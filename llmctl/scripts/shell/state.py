"""State of a script at one point: variables, functions, files that it has written, and the commands so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmctl.scripts.shell.syntax import Block
from llmctl.scripts.shell.values import Missing, Value, absent, missing_of, plain, text_of

Variable = Value | list[Value]
"""A value, or the items of an array."""


@dataclass(frozen=True)
class Run:
    """A command that the script would run.

    Attributes:
        line: of the script.
        words: the command and its arguments.
        environment: exported variables, and those set for this command alone.
        folder: in which the command runs; ``.`` is the one in which the script starts.
        loops: variable of each ``for`` loop around the command, from outside in, with its value in this round.
    """

    line: int
    words: tuple[Value, ...]
    environment: Mapping[str, Value]
    folder: Value = ()
    loops: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Name of the program, without its folder."""
        return text_of(self.words[0]).rpartition("/")[2] if self.words else ""


_OF_ONE_SHELL = ("variables", "keys", "associative", "frames", "exported", "functions", "positional", "leaving")


@dataclass
class State:
    """All that a command can change.

    Attributes:
        variables: by name.
        keys: of each associative or sparse array, in the order of its items.
        associative: names of the associative arrays.
        frames: of each function that runs now, the variables that its local ones hide; None for one that was unset.
        exported: names of variables in the environment of commands.
        functions: bodies by name.
        positional: ``$1`` and so on; None if the arguments of the script are unknown.
        files: contents of files that the script writes itself, by path.
        runs: commands so far, without those of the shell itself.
        skipped: commands of the shell that have no meaning here, with their lines.
        exits: lines of the script's own exits on the way here.
        leaving: the word that ends the current block: exit, return, break or continue.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    associative: set[str] = field(default_factory=set)
    frames: list[dict[str, Variable | None]] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Block] = field(default_factory=dict)
    positional: list[Value] | None = None
    files: dict[str, Value] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    leaving: str = ""

    def copy(self) -> State:
        """An independent copy."""
        return replace(
            self,
            variables={
                name: list(value) if isinstance(value, list) else value for name, value in self.variables.items()
            },
            keys={name: list(keys) for name, keys in self.keys.items()},
            associative=set(self.associative),
            frames=[dict(frame) for frame in self.frames],
            exported=set(self.exported),
            functions=dict(self.functions),
            positional=None if self.positional is None else list(self.positional),
            files=dict(self.files),
            runs=list(self.runs),
            skipped=list(self.skipped),
            exits=list(self.exits),
        )

    def keep_match(self, parts: Sequence[str], line: int) -> None:
        """Set BASH_REMATCH to the parts that a ``=~`` matched."""
        self.variables["BASH_REMATCH"] = [plain(text, line) for text in parts]

    def hide(self, name: str) -> None:
        """Make a variable local to the function that runs now."""
        if self.frames and name not in self.frames[-1]:
            self.frames[-1][name] = self.variables.get(name)

    def end_function(self) -> None:
        """Bring back the variables that the function's local ones hid."""
        for name, value in self.frames.pop().items():
            if value is None:
                self.variables.pop(name, None)
            else:
                self.variables[name] = value

    def with_variables_of(self, before: State) -> State:
        """The state after a shell of its own: its commands and files stay, its variables and functions do not."""
        return replace(self.copy(), **{name: getattr(before.copy(), name) for name in _OF_ONE_SHELL})

    def environment(self) -> dict[str, Value]:
        """The exported variables that are set; of an array the first item, as in bash."""
        found = {}
        for name in sorted(self.exported & self.variables.keys()):
            value = self.variables[name]
            if isinstance(value, list):
                value = value[0] if value else ()
            found[name] = value
        return found


def merge(one: State, other: State, line: int, cause: str = "") -> State:
    """The state after a condition that only the job knows: a variable that differs becomes unknown.

    The commands of both are kept.

    Args:
        one: after one branch.
        other: after the other.
        line: of the condition.
        cause: variable that decides the condition; empty if none does.
    """
    merged = one.copy()
    merged.exported |= other.exported
    merged.functions.update(other.functions)
    merged.associative |= other.associative
    merged.keys = {**other.keys, **merged.keys}
    for frame, further in zip(merged.frames, other.frames, strict=False):
        frame.update({name: value for name, value in further.items() if name not in frame})
    for name in one.variables.keys() | other.variables.keys():
        first, second = one.variables.get(name), other.variables.get(name)
        if first is None or second is None or not _equal(first, second):
            of = f" on ${cause}" if cause else ""
            why = f"depends on a condition{of} in line {line} that only the job knows"
            merged.variables[name] = absent(Missing(line, f"${name}", why, cause or name))
    if one.positional != other.positional:
        merged.positional = None
    known = {_shown(run) for run in one.runs}
    merged.runs += [run for run in other.runs if _shown(run) not in known]
    merged.skipped = list(dict.fromkeys([*one.skipped, *other.skipped]))
    merged.files.update(other.files)
    return merged


def numbers(value: int, line: int) -> Value:
    """The value of an arithmetic expression."""
    return plain(str(value), line)


def _shown(run: Run) -> tuple[int, tuple[str, ...]]:
    return run.line, tuple(text_of(word) for word in run.words)


def _equal(first: Variable, second: Variable) -> bool:
    if isinstance(first, list) != isinstance(second, list):
        return False
    left = first if isinstance(first, list) else [first]
    right = second if isinstance(second, list) else [second]
    return [(text_of(one), missing_of(one)) for one in left] == [(text_of(one), missing_of(one)) for one in right]
