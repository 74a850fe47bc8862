"""Output of ``$( )``, where it follows from the script alone. No command is ever executed."""

from __future__ import annotations

from datetime import datetime

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.command_reader import read_script
from llmctl.scripts.shell.folders import below, bound, folder_of
from llmctl.scripts.shell.outputs import output_of, quotient_of
from llmctl.scripts.shell.reading import input_of
from llmctl.scripts.shell.shell_commands import Shell, ShellCommands
from llmctl.scripts.shell.syntax import Block, Chain, Command, Pipeline, Simple, Substitution
from llmctl.scripts.shell.values import Chunk, Missing, Value, absent, missing_of, plain, text_of, without_line_ends

_SHOWN = 60


class Substitutions:
    """The substitutions of one script."""

    def __init__(self, walk: Shell, commands: ShellCommands, gpus: int | None, now: datetime) -> None:
        """Read in the state of ``walk``; ``gpus`` of a node and the time ``now`` stand for those of the job."""
        self._walk, self._commands, self._gpus, self._now = walk, commands, gpus, now

    def value(self, part: Substitution) -> Value:
        """The output, or a part that nobody can know here."""
        walk = self._walk
        shown = " ".join(part.source.split())
        shown = f"$({shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'})"
        before = walk.state
        try:
            block = read_script(part.source, part.line)
            walk.state = before.copy()
            found = self._output(block)
        except ScriptError:
            found = None
        finally:
            walk.state = before
        if found is None:
            return absent(Missing(part.line, shown, "is never executed"))
        return without_line_ends(found)

    def _output(self, block: Block) -> Value | None:
        """Output of a substitution, if it follows from the script alone."""
        walk = self._walk
        command = block[0] if len(block) == 1 else None
        line = command.line if command is not None else 0
        if isinstance(command, Pipeline) and not command.is_negated:
            return self._pipe_output(command)
        if isinstance(command, Chain) and len(command.rest) == 1 and isinstance(command.first, Simple):
            return self._chain_output(command.first, *command.rest[0])
        if not isinstance(command, Simple):
            return None
        words = walk.expansion.words(command.words)
        if [text_of(word) for word in words] in (["bc"], ["bc", "-l"]):
            return _quotient(input_of(command, walk.expansion))
        if words and text_of(words[0]) == "cat":
            return self._commands.shown_by_cat(command, words)
        if words and text_of(words[0]) == "echo" and len(words) > 1:
            return tuple(chunk for word in words[1:] for chunk in (*word, Chunk(" ", line)))[:-1]
        text = output_of(words, lambda expression: walk.number(expression, line), self._now)
        return None if text is None else bound(words, text, walk.state, line)

    def _chain_output(self, command: Simple, operator: str, then: Command) -> Value | None:
        """Output of ``cd FOLDER && pwd``, or of ``[ TEST ] && echo WORDS``."""
        walk, line = self._walk, command.line
        first = walk.expansion.words(command.words)
        if first and text_of(first[0]) in ("[", "test"):
            truth = self._commands.test(command, first)
            if not truth.is_sure:
                return None
            return self._output((then,)) if truth.value == (operator == "&&") else plain("", line)
        second = walk.expansion.words(then.words) if isinstance(then, Simple) else []
        is_folder = [text_of(word) for word in (*first[:1], *second)] == ["cd", "pwd"] and len(first) == 2
        return below(folder_of(walk.state, line), first[1], line) if is_folder else None

    def _pipe_output(self, pipeline: Pipeline) -> Value | None:
        walk = self._walk
        commands = [walk.expansion.words(one.words) for one in pipeline.commands if isinstance(one, Simple)]
        names = [text_of(words[0]) if words else "" for words in commands]
        if names == ["nvidia-smi", "wc"] and self._gpus is not None:
            return plain(str(self._gpus), pipeline.line)
        if names == ["echo", "bc"] and len(pipeline.commands) == 2:
            number = walk.number(" ".join(text_of(word) for word in commands[0][1:]), pipeline.line)
            return None if number is None else plain(str(number), pipeline.line)
        return None


def _quotient(text: Value | None) -> Value | None:
    """Output of ``bc`` for ``scale=N; A/B``; None for anything else."""
    if text is None or missing_of(text) is not None:
        missing = missing_of(text or ())
        return absent(missing) if missing is not None and missing.name else None
    found = quotient_of(text_of(text))
    return None if found is None else plain(found, text[0].line)
