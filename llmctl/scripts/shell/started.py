"""Scripts beside a script, which it starts: each runs in a shell of its own, with the exported variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.command_reader import read_script
from llmctl.scripts.shell.folders import below
from llmctl.scripts.shell.interpreter import Interpreter
from llmctl.scripts.shell.state import Run, State
from llmctl.scripts.shell.values import Value, plain, text_of

_MOST = 100
"""Scripts that one script starts."""


@dataclass
class Started:
    """Reads the scripts that a script starts, and the texts of ``bash -c``.

    Attributes:
        interpreter: of the script.
        unread: an error for each script that could not be read.
    """

    interpreter: Interpreter
    unread: list[ScriptError] = field(default_factory=list)
    _count: int = 0

    def text(self, words: Sequence[Value], run: Run) -> list[Run]:
        """The commands of a text, which ``bash -c`` runs in the folder of ``run``."""
        state = self.interpreter.state
        before = len(state.runs)
        state.variables |= {**run.environment, "PWD": run.folder}
        self.interpreter.shell.nested(words, run.line)
        return self.interpreter.state.runs[before:]

    def script(self, words: Sequence[Value], run: Run) -> list[Run] | None:
        """The commands of a script with its arguments; None if the file is elsewhere, or cannot be read."""
        shown = text_of(words[0]) or "a script"
        try:
            found = self.interpreter.world.beside(below(run.folder, words[0], run.line))
            if found is not None:
                self._count += 1
                if self._count > _MOST:
                    raise ScriptError(run.line, f"starts {shown} again and again")
                return self._commands(*found, words[1:], run)
        except ScriptError as error:
            self.unread.append(error)
            return None
        problem = f"starts {shown}, which is not beside the script; put it there, or import {shown} itself"
        self.unread.append(ScriptError(run.line, problem))
        return None

    def _commands(self, name: str, text: str, arguments: Sequence[Value], run: Run) -> list[Run]:
        interpreter, before = self.interpreter, self.interpreter.state
        own = {"PWD": run.folder, "0": plain(f"./{name}", run.line), "BASH_SOURCE": plain(f"./{name}", run.line)}
        interpreter.state = State(
            variables={**run.environment, **own},
            exported=set(run.environment),
            positional=list(arguments),
            files=before.files,
            skipped=before.skipped,
        )
        try:
            interpreter.run(read_script(text, run.line, [run.line] * (len(text) + 1)))
            return interpreter.state.runs
        except ScriptError as error:
            raise error.read_in(f" (in {name}, read here)") from None
        finally:
            interpreter.state = before
