"""Walk through a script: values of variables, branches and loops. No command is ever executed.

A condition that only the job knows is followed both ways: a variable with two results becomes unknown. A file that a
test asks for counts as absent, as before a first run, unless the script would then end without training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.assigning import assign
from llmctl.scripts.shell.command_reader import read_script
from llmctl.scripts.shell.conditions import UNKNOWN, YES, Truth, decide, unknown_by
from llmctl.scripts.shell.expansion import Expansion, Unknown, matches, unset
from llmctl.scripts.shell.folders import folder_of
from llmctl.scripts.shell.outputs import output_of
from llmctl.scripts.shell.shell_commands import SHELL_COMMANDS, ShellCommands
from llmctl.scripts.shell.state import Run, State, merge
from llmctl.scripts.shell.substitutions import Substitutions
from llmctl.scripts.shell.syntax import (
    ArithmeticCommand,
    Assignment,
    Block,
    Case,
    Chain,
    Command,
    For,
    ForArithmetic,
    Function,
    Group,
    If,
    Pipeline,
    Simple,
    Test,
    While,
    Word,
)
from llmctl.scripts.shell.values import (
    OF_A_PATTERN,
    Missing,
    Value,
    absent,
    is_pattern,
    missing_of,
    named_after,
    plain,
    text_of,
)
from llmctl.scripts.shell.word_reader import read_quoted_text

_STEPS, _DEPTH = 20_000, 20
_SUBMITTING = ("sbatch", "qsub", "bsub")
_STARTING = (["conda", "run"], ["mamba", "run"])
_HARMLESS = frozenset(("mkdir", "echo", "printf", "chmod", "touch", "rm", "cp", "mv", "ln", "sleep", "ulimit", "trap"))


@dataclass(frozen=True)
class World:
    """All that a script does not say itself.

    Attributes:
        given: variables set by the user with --arg, which no line of the script changes.
        outside: value of a variable that a shell or scheduler sets, by name and line.
        gpus: GPUs of a node, for scripts that count them; None if unknown.
        now: the time of the import, for ``date``.
        arguments: number of the script's arguments, whose values are unknown unless given; 0 if unknown.
        beside: name and text of a file beside the script; None if the file is elsewhere.
    """

    given: dict[str, str]
    outside: Callable[[str, int], Value | None]
    gpus: int | None
    now: datetime
    beside: Callable[[Value], tuple[str, str] | None] = lambda _name: None
    arguments: int = 0


class Interpreter:
    """One script."""

    def __init__(self, world: World) -> None:
        """Start with the positional parameters among ``world.given``.

        ``used`` has the user's variables that were met; ``open_files`` the line of each command that reads a file of an
        unknown name -> this name, and its unknown parts.
        """
        self.world = world
        self.state = State()
        positional = {int(name): value for name, value in world.given.items() if name.isdigit()}
        count = max([*positional, world.arguments])
        if count:
            self.state.positional = [
                plain(positional[place], 0)
                if place in positional
                else absent(unset(str(place), 0, is_open=world.arguments > 0))
                for place in range(1, count + 1)
            ]
        self._steps = self._depth = 0
        self._loops: list[tuple[str, str]] = []
        self.used: set[str] = set()
        self.open_files: dict[int, tuple[str, list[Missing]]] = {}
        self.shell = ShellCommands(self)

    @property
    def given(self) -> dict[str, str]:
        """Variables set by the user, which no line of the script changes."""
        return self.world.given

    @property
    def expansion(self) -> Expansion:
        """Expansion of words in the present state."""
        inner = Substitutions(self, self.shell, self.world.gpus, self.world.now)
        return Expansion(self.state, self._outside, inner.value)

    def run(self, block: Block) -> Truth:
        """Walk through commands; the result is the last command's."""
        result = YES
        for command in block:
            result = self.command(command)
            if self.state.leaving:
                break
        return result

    def command(self, command: Command) -> Truth:
        """Walk through one command."""
        self._steps += 1
        if self._steps > _STEPS:
            raise ScriptError(command.line, f"the script takes more than {_STEPS:,} steps; a loop may never end")
        match command:
            case Simple():
                return self._simple(command)
            case Chain():
                return self._chain(command)
            case Pipeline():
                return self._pipeline(command)
            case If():
                return self._if(command.arms, command.otherwise)
            case While() | For() | ForArithmetic():
                return self._loop(command)
            case _:
                return self._other(command)

    def _other(self, command: Case | Group | Test | ArithmeticCommand | Function) -> Truth:
        match command:
            case Case():
                return self._case(command)
            case Group():
                return self._apart(command.body) if command.is_subshell else self.run(command.body)
            case Test():
                words = [self.expansion.text(word) for word in command.words]
                return decide(words, command.line, self.number, self.state.keep_match)
            case ArithmeticCommand():
                return self.arithmetic(command.expression, command.line)
            case Function():
                self.state.functions[command.name] = command.body
                return YES

    def _apart(self, body: Block) -> Truth:
        """Walk through commands in a shell of their own."""
        before = self.state.copy()
        result = self.run(body)
        self.state = self.state.with_variables_of(before)
        return result

    def number(self, text: str, line: int) -> int | None:
        """The value of an arithmetic expression; None if unknown."""
        try:
            return self.expansion.number(read_quoted_text(text, line), line)
        except Unknown:
            return None

    def arithmetic(self, expression: Word, line: int) -> Truth:
        """The result of ``(( ))``: True unless 0."""
        try:
            return Truth(self.expansion.number(expression, line) != 0)
        except Unknown:
            return UNKNOWN

    def nested(self, text: str, lines: Sequence[int]) -> Truth:
        """Walk through text that is a script itself, with the line of every character."""
        with self._deeper(lines[0], "eval"):
            return self.run(read_script(text, lines[0], lines))

    def source(self, words: Sequence[Value], line: int) -> Truth | None:
        """Walk through a file beside the script; None if the file is elsewhere. All its lines count as ``line``."""
        if len(words) < 2 or (found := self.world.beside(words[1])) is None:
            missing = [chunk.missing for chunk in words[1] if chunk.missing is not None] if len(words) > 1 else []
            if missing and all(one.name for one in missing):
                shown = "".join(chunk.missing.what if chunk.missing else chunk.text for chunk in words[1])
                self.open_files[line] = (shown, list(dict.fromkeys(missing)))
            return None
        name, text = found
        before, self.state.positional = self.state.positional, list(words[2:]) or self.state.positional
        try:
            with self._deeper(line, name):
                result = self.run(read_script(text, line, [line] * (len(text) + 1)))
        except ScriptError as error:
            where = "" if error.problem.endswith("read here)") else f" (in {name}, read here)"
            raise error.read_in(where) from None
        self.state.positional = before if len(words) > 2 else self.state.positional
        self.state.leaving = "" if self.state.leaving == "return" else self.state.leaving
        return result

    def call(self, name: str, arguments: Sequence[Value], line: int) -> Truth:
        """Walk through a function's body."""
        before, self.state.positional = self.state.positional, list(arguments)
        self.state.frames.append({})
        with self._deeper(line, name):
            result = self.run(self.state.functions[name])
        self.state.positional = before
        self.state.end_function()
        self.state.leaving = "" if self.state.leaving == "return" else self.state.leaving
        return result

    def assign(self, assignment: Assignment) -> None:
        """Set a variable; one that the user gave keeps the user's value, unless the line changes that very value."""
        assign(assignment, self.expansion, self.world.given, self.number)

    def print_into(self, name: str, words: Sequence[Value], line: int) -> None:
        """Set a variable to the output of a command, ``printf -v``."""
        if name not in self.world.given:
            text = output_of(words, lambda expression: self.number(expression, line), self.world.now)
            unknown = absent(Missing(line, f"${name}", "is printed when the script runs", name))
            self.state.variables[name] = unknown if text is None else plain(text, line)

    @contextmanager
    def _deeper(self, line: int, what: str) -> Iterator[None]:
        self._depth += 1
        if self._depth > _DEPTH:
            raise ScriptError(line, f"{what} calls itself again and again")
        yield
        self._depth -= 1

    def _outside(self, name: str, line: int) -> Value | None:
        if name in self.world.given:
            self.used.add(name)
            return plain(self.world.given[name], line)
        return self.world.outside(name, line)

    def _simple(self, command: Simple) -> Truth:
        words = self.expansion.words(command.words)
        if not words:
            for assignment in command.assignments:
                self.assign(assignment)
            return YES
        name, line = text_of(words[0]), command.line
        if name in SHELL_COMMANDS and [text_of(word) for word in words[:2]] not in _STARTING:
            return self.shell.run(name, command, words)
        if name in self.state.functions:
            return self.call(name, words[1:], command.line)
        if name == "cat":
            self.shell.write_file(command, words)
        if name in _SUBMITTING and command.documents:
            return self._submitted(command)
        environment = self.state.environment()
        for assignment in command.assignments:
            environment[assignment.name] = named_after(self.expansion.text(assignment.value), assignment.name)
        loops = tuple(loop for loop in self._loops if loop[0])
        self.state.runs.append(Run(command.line, tuple(words), environment, folder_of(self.state, line), loops))
        return YES if name.rpartition("/")[2] in _HARMLESS else UNKNOWN

    def _submitted(self, command: Simple) -> Truth:
        """Walk through a job's script that stands in this one: ``sbatch <<EOF``."""
        before = self.state.copy()
        self.shell.nested([self.expansion.text(command.documents[-1].content[0])], command.line)
        self.state = self.state.with_variables_of(before)
        return UNKNOWN

    def _chain(self, chain: Chain) -> Truth:
        result = self.command(chain.first)
        for operator, command in chain.rest:
            if self.state.leaving:
                return result
            wanted = result if operator == "&&" else ~result
            if wanted.is_sure and not wanted.value:
                continue
            before = result
            if wanted.is_sure:
                after = self.command(command)
            else:
                keep = partial(Truth, before.value, before.is_sure)
                after = self._both_ways(wanted, command.line, partial(self.command, command), keep)
            result = (before & after) if operator == "&&" else (before | after)
        return result

    def _pipeline(self, pipeline: Pipeline) -> Truth:
        result = YES
        for command in pipeline.commands:
            # Each of several commands has a shell of its own.
            result = self.command(command) if len(pipeline.commands) == 1 else self._apart((command,))
        return ~result if pipeline.is_negated else result

    def _if(self, arms: Sequence[tuple[Block, Block]], otherwise: Block) -> Truth:
        if not arms:
            return self.run(otherwise)
        condition, body = arms[0]
        line = condition[0].line if condition else 0
        truth = self.run(condition)
        if truth.is_sure:
            return self.run(body) if truth.value else self._if(arms[1:], otherwise)
        return self._both_ways(truth, line, lambda: self.run(body), lambda: self._if(arms[1:], otherwise))

    def _both_ways(self, truth: Truth, line: int, then: Callable[[], Truth], otherwise: Callable[[], Truth]) -> Truth:
        """Follow both ways of a condition that is not sure, and go on with the likely one, or with both."""
        before = self.state
        self.state = before.copy()
        results, states = [], []
        for follow in (then, otherwise):
            self.state = before.copy()
            results.append(follow())
            states.append(self.state)
        ends = [state.leaving in ("exit", "return") and len(state.runs) == len(before.runs) for state in states]
        likely = (0 if ends[1] else 1) if ends[0] != ends[1] else None if truth.value is None else int(not truth.value)
        if likely is not None:
            self.state = states[likely]
            return results[likely]
        self.state = merge(states[0], states[1], line, self._decider(truth))
        return results[0] if results[0] == results[1] else UNKNOWN

    def _case(self, case: Case) -> Truth:
        word = self.expansion.text(case.word)
        missing = missing_of(word)
        if missing is not None and missing.stand_in is None:
            result, unknown = YES, unknown_by(word)
            for _, body in case.arms:
                result = self._both_ways(unknown, case.line, partial(self.run, body), lambda: YES)
            return result
        for patterns, body in case.arms:
            if any(matches(text_of(word), text_of(self.expansion.text(pattern))) for pattern in patterns):
                return self.run(body)
        return YES

    def _decider(self, truth: Truth) -> str:
        """The variable that a user would give; in a loop, ``$1`` is another argument in every round."""
        return "" if self._loops and truth.cause.isdigit() else truth.cause

    def _loop(self, loop: While | For | ForArithmetic) -> Truth:
        self._loops.append(("", ""))
        result = self._repeat(loop)
        self._loops.pop()
        return result

    def _repeat(self, loop: While | For | ForArithmetic) -> Truth:
        for is_sure in self._rounds(loop):
            if not is_sure:
                self._both_ways(UNKNOWN, loop.line, lambda: self.run(loop.body), lambda: YES)
                self.state.leaving = "" if self.state.leaving in ("break", "continue") else self.state.leaving
                return UNKNOWN
            self.run(loop.body)
            left, self.state.leaving = self.state.leaving, ""
            if left in ("exit", "return"):
                self.state.leaving = left
            if left and left != "continue":
                break
        return YES

    def _items(self, loop: For) -> list[Value]:
        """The words of a loop; the files that a pattern finds are one unknown word."""
        if loop.name in self.world.given:
            return [plain(self.world.given[loop.name], loop.line)]
        words = self.expansion.words(loop.words) if loop.words is not None else list(self.state.positional or ())
        pattern = Missing(loop.line, "", OF_A_PATTERN)
        return [absent(replace(pattern, what=text_of(word))) if is_pattern(word) else word for word in words]

    def _rounds(self, loop: While | For | ForArithmetic) -> Iterator[bool]:
        """One item per round: True for a sure round; False if nobody knows the rounds."""
        if isinstance(loop, For):
            for word in self._items(loop):
                self.state.variables[loop.name] = word
                self._loops[-1] = (loop.name, text_of(word))
                yield missing_of(word) is None
            return
        if isinstance(loop, ForArithmetic):
            self.arithmetic(loop.start, loop.line)
        while True:
            if isinstance(loop, While):
                truth = self.run(loop.condition)
                truth = ~truth if loop.until else truth
            else:
                truth = self.arithmetic(loop.condition, loop.line)
            if truth.is_sure and not truth.value:
                return
            self._steps += 1
            if self._steps > _STEPS:
                raise ScriptError(loop.line, "the loop that begins here may never end")
            yield truth.is_sure
            if isinstance(loop, ForArithmetic):
                self.arithmetic(loop.step, loop.line)
