"""Commands of the shell itself, as far as they change what a script would run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.conditions import NO, UNKNOWN, YES, Truth, decide
from llmctl.scripts.shell.expansion import Expansion
from llmctl.scripts.shell.folders import change_folder
from llmctl.scripts.shell.reading import variables_read
from llmctl.scripts.shell.state import State
from llmctl.scripts.shell.syntax import Assignment, Simple
from llmctl.scripts.shell.values import Chunk, Missing, Value, absent, missing_of, text_of

_SCOPED = ("declare", "local", "typeset")
_LEAVING = ("exit", "return", "break", "continue")
_SKIPPED = ("module", "ml", "conda", "mamba", "spack", "pyenv")
_READING = ("read", "mapfile", "readarray", "getopts", "select")
_NOTHING = (
    "set",
    "shopt",
    "trap",
    "ulimit",
    "umask",
    "wait",
    "hash",
    "alias",
    "unalias",
    "bind",
)


class Shell(Protocol):
    """The parts of an interpreter that the commands use.

    Attributes:
        given: variables set by the user, which no line of the script changes.
        state: of the script.
        expansion: of words in the present state.
    """

    state: State

    @property
    def given(self) -> dict[str, str]: ...  # noqa: D102 (described above)
    @property
    def expansion(self) -> Expansion: ...  # noqa: D102

    def assign(self, assignment: Assignment) -> None:
        """Set a variable."""

    def print_into(self, name: str, words: Sequence[Value], line: int) -> None:
        """Set a variable to the output of a command."""

    def number(self, text: str, line: int) -> int | None:
        """Value of an arithmetic text; None if unknown."""

    def source(self, words: Sequence[Value], line: int) -> Truth | None:
        """Walk through a file beside the script; None if the file is elsewhere."""

    def nested(self, text: str, lines: Sequence[int]) -> Truth:
        """Walk through a text that is a script itself."""


class ShellCommands:
    """The shell's commands, in the state of an interpreter."""

    def __init__(self, interpreter: Shell) -> None:
        """Act on the state of ``interpreter``."""
        self._interpreter = interpreter

    def run(self, name: str, command: Simple, words: Sequence[Value]) -> Truth:
        """Carry out a command of SHELL_COMMANDS."""
        return SHELL_COMMANDS[name](self, command, list(words))

    def declare(self, command: Simple, words: list[Value]) -> Truth:
        """``export`` and its relatives."""
        name, *rest = (text_of(word) for word in words)
        options = "".join(word[1:] for word in rest if word.startswith("-"))
        state = self._interpreter.state
        names = [*(assignment.name for assignment in command.assignments), *filter(str.isidentifier, rest)]
        for one in names if name in _SCOPED and "g" not in options else ():
            if state.frames and one not in self._interpreter.given and one not in state.frames[-1]:
                state.hide(one)
                is_set = any(assignment.name == one for assignment in command.assignments)
                state.variables[one] = state.variables.get(one, ()) if is_set else ()
        if "A" in options:
            state.associative |= set(names)
            for one in names:
                state.keys.setdefault(one, [])
                state.variables.setdefault(one, [])
        for assignment in command.assignments:
            self._interpreter.assign(assignment)
        if name == "export" or "-x" in rest:
            state.exported |= {assignment.name for assignment in command.assignments}
            state.exported |= {word for word in rest if word.isidentifier()}
        return YES

    def unset(self, command: Simple, words: list[Value]) -> Truth:
        """``unset``."""
        del command
        state = self._interpreter.state
        for word in words[1:]:
            name, bracket, index = text_of(word).partition("[")
            items = state.variables.get(name)
            if not bracket:
                state.variables.pop(name, None)
                state.keys.pop(name, None)
            elif isinstance(items, list):
                keys = state.keys.get(name) or [str(place) for place in range(len(items))]
                left = [place for place, key in enumerate(keys) if key != index.rstrip("]")]
                state.variables[name] = [items[place] for place in left]
                state.keys[name] = [keys[place] for place in left]
        return YES

    def shift(self, command: Simple, words: list[Value]) -> Truth:
        """``shift``."""
        del command
        state = self._interpreter.state
        count = int(text_of(words[1])) if len(words) > 1 and text_of(words[1]).isdigit() else 1
        if state.positional is not None:
            state.positional = state.positional[count:]
        return YES

    def leave(self, command: Simple, words: list[Value]) -> Truth:
        """``exit``, ``return``, ``break`` and ``continue``."""
        self._interpreter.state.leaving = text_of(words[0])
        if self._interpreter.state.leaving == "exit":
            self._interpreter.state.exits.append(command.line)
        return Truth(len(words) < 2 or text_of(words[1]) == "0")

    def test(self, command: Simple, words: list[Value]) -> Truth:
        """``test`` and ``[``."""
        inner = words[1:]
        if text_of(words[0]) == "[":
            if not inner or text_of(inner[-1]) != "]":
                raise ScriptError(command.line, "[ opens here and never closes with ]")
            inner = inner[:-1]
        return decide(inner, command.line, self._interpreter.number)

    def evaluate(self, command: Simple, words: list[Value]) -> Truth:
        """``eval``: its text is read as a script."""
        return self.nested(words[1:], command.line)

    def nested(self, words: Sequence[Value], line: int) -> Truth:
        """Text that is a script itself. Unknown parts, and found folders, are kept as variables of their own."""
        interpreter, text, lines = self._interpreter, "", list[int]()
        for word in words:
            for chunk in (*word, Chunk(" ", word[-1].line if word else line)):
                part = chunk.text
                if chunk.missing is not None or chunk.is_here:
                    # A name that no script can write, so that the part stays one value.
                    name = f"__part_{len(interpreter.state.variables)}"
                    interpreter.state.variables[name] = (replace(chunk, quoted=True, divides=False),)
                    part = f"${{{name}}}"
                text += part
                lines += [chunk.line] * len(part)
        return interpreter.nested(text, lines) if text.strip() else YES

    def source(self, command: Simple, words: list[Value]) -> Truth:
        """``source``: a file beside the script is read; another prepares the environment."""
        result = self._interpreter.source(words, command.line)
        return self.skip(command, words) if result is None else result

    def skip(self, command: Simple, words: list[Value]) -> Truth:
        """A command that prepares the environment, which the cluster's profile does here."""
        shown = " ".join(text_of(word) for word in words)
        self._interpreter.state.skipped.append((command.line, shown))
        return UNKNOWN

    def read(self, command: Simple, words: list[Value]) -> Truth:
        """``read`` and its relatives: the variables become unknown, unless the script has the text itself."""
        found = variables_read(command, words, self._interpreter.expansion)
        if found is not None:
            given = self._interpreter.given
            self._interpreter.state.variables.update({name: one for name, one in found.items() if name not in given})
            return Truth(value=True, is_sure=False)
        for word in words[1:]:
            name = text_of(word)
            if name.isidentifier() and name not in self._interpreter.given:
                missing = Missing(command.line, f"${name}", "is read when the script runs", name)
                self._interpreter.state.variables[name] = absent(missing)
        return UNKNOWN

    def positional(self, command: Simple, words: list[Value]) -> Truth:
        """``set -- words``; other options of the shell have no meaning here."""
        del command
        texts = [text_of(word) for word in words]
        if "--" in texts:
            self._interpreter.state.positional = words[texts.index("--") + 1 :]
        return YES

    def calculate(self, command: Simple, words: list[Value]) -> Truth:
        """``let``."""
        result = YES
        for word in words[1:]:
            value = self._interpreter.number(text_of(word), command.line)
            result = UNKNOWN if value is None else Truth(value != 0)
        return result

    def succeed(self, command: Simple, words: list[Value]) -> Truth:
        """``true``, ``:`` and commands without meaning here."""
        del command, words
        return YES

    def change_folder(self, command: Simple, words: list[Value]) -> Truth:
        """``cd``, ``pushd`` and ``popd``."""
        change_folder(self._interpreter.state, words, command.line)
        return YES

    def fail(self, command: Simple, words: list[Value]) -> Truth:
        """``false``."""
        del command, words
        return NO

    def write(self, command: Simple, words: list[Value]) -> Truth:
        """``echo`` and ``printf`` into a file."""
        if text_of(words[0]) == "printf" and len(words) > 3 and text_of(words[1]) == "-v":
            self._interpreter.print_into(text_of(words[2]), [words[0], *words[3:]], command.line)
            return YES
        text: list[Chunk] = []
        for word in words[1:]:
            if text_of(word) not in ("-e", "-n"):
                text += [*word, Chunk(" ", command.line)]
        self._keep(command, (*text[:-1], Chunk("\n", command.line)))
        return YES

    def write_file(self, command: Simple, words: Sequence[Value]) -> None:
        """``cat`` of a here-document into a file."""
        shown = self.shown_by_cat(command, words)
        if shown is not None:
            self._keep(command, shown)

    def shown_by_cat(self, command: Simple, words: Sequence[Value]) -> Value | None:
        """Output of ``cat``: a here-document, or files that the script wrote; None if unknown."""
        expansion, files = self._interpreter.expansion, self._interpreter.state.files
        if command.documents and len(words) == 1:
            return expansion.text(command.documents[-1].content[0])
        parts = [files.get(text_of(word)) for word in words[1:]]
        known = [part for part in parts if part is not None]
        return tuple(chunk for part in known for chunk in part) if known and len(known) == len(parts) else None

    def _keep(self, command: Simple, text: Value) -> None:
        expansion, files = self._interpreter.expansion, self._interpreter.state.files
        for redirect in command.redirects:
            if redirect.operator in (">", ">>", ">|"):
                target = expansion.text(redirect.target)
                if missing_of(target) is None:
                    path = text_of(target)
                    files[path] = (*files.get(path, ()), *text) if redirect.operator == ">>" else text


SHELL_COMMANDS: dict[str, Callable[[ShellCommands, Simple, list[Value]], Truth]] = {
    **dict.fromkeys(("export", "declare", "local", "readonly", "typeset"), ShellCommands.declare),
    **dict.fromkeys(_LEAVING, ShellCommands.leave),
    **dict.fromkeys(_SKIPPED, ShellCommands.skip),
    **dict.fromkeys(("source", "."), ShellCommands.source),
    **dict.fromkeys(_READING, ShellCommands.read),
    **dict.fromkeys(_NOTHING, ShellCommands.succeed),
    **dict.fromkeys(("cd", "pushd", "popd"), ShellCommands.change_folder),
    **dict.fromkeys(("true", ":"), ShellCommands.succeed),
    **dict.fromkeys(("[", "test"), ShellCommands.test),
    **dict.fromkeys(("echo", "printf"), ShellCommands.write),
    "false": ShellCommands.fail,
    "eval": ShellCommands.evaluate,
    "unset": ShellCommands.unset,
    "shift": ShellCommands.shift,
    "set": ShellCommands.positional,
    "let": ShellCommands.calculate,
}
"""Name -> action of every command that is part of the shell."""
