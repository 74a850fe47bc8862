"""Error for a script that cannot be read as a config."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.errors import UsageError


@dataclass(frozen=True)
class Choice:
    """A question without whose answer a script is not read to its end.

    Attributes:
        name: for --arg.
        values: those known to lead on, the one to assume first.
    """

    name: str
    values: tuple[str, ...]


class ScriptError(UsageError):
    """A script that cannot be read, or that trains nothing this trainer knows.

    Attributes:
        line: line of the script, counted from 1; 0 for the script as a whole.
        problem: one sentence without file and line; with others after it, one a line.
        asked: line and sentence of each question; empty for a refusal.
        choice: set for a question behind which further ones may stand.
    """

    def __init__(
        self,
        line: int,
        problem: str,
        source: str = "",
        *,
        asked: Sequence[tuple[int, str]] = (),
        choice: Choice | None = None,
    ) -> None:
        where = ", ".join([*([source] if source else []), *([f"line {line}"] if line else [])])
        super().__init__(f"{where}: {problem}" if where else problem)
        self.line = line
        self.problem = problem
        self.asked = tuple(asked)
        self.choice = choice

    @classmethod
    def asking(cls, line: int, problem: str, name: str, values: Sequence[str]) -> "ScriptError":
        """One question; with known answers, further ones may stand behind it."""
        choice = Choice(name, tuple(values)) if values else None
        return cls(line, problem, asked=[(line, problem)], choice=choice)

    def within(self, source: str) -> "ScriptError":
        """The same error with the name of the file."""
        return ScriptError(self.line, self.problem, source)

    def read_in(self, where: str) -> "ScriptError":
        """The same error with words on the file beside the script that has it."""
        asked = [(line, f"{problem}{where}") for line, problem in self.asked]
        return ScriptError(self.line, f"{self.problem}{where}", asked=asked, choice=self.choice)


def all_problems(problems: Sequence[tuple[int, str]]) -> ScriptError:
    """One error with several problems, one a line.

    Args:
        problems: line of the script and sentence of each; at least one.
    """
    (line, first), *others = list(dict.fromkeys(problems))
    also = "".join(f"\nalso: {f'line {number}: ' if number else ''}{problem}" for number, problem in others)
    return ScriptError(line, f"{first}{also}")
