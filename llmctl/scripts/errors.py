"""Error for a script that cannot be read as a config."""

from collections.abc import Sequence

from llmctl.errors import UsageError


class ScriptError(UsageError):
    """A script that cannot be read, or that trains nothing this trainer knows.

    Attributes:
        line: line of the script, counted from 1; 0 for the script as a whole.
        problem: one sentence without file and line.
    """

    def __init__(self, line: int, problem: str, source: str = "") -> None:
        where = ", ".join([*([source] if source else []), *([f"line {line}"] if line else [])])
        super().__init__(f"{where}: {problem}" if where else problem)
        self.line = line
        self.problem = problem

    def within(self, source: str) -> "ScriptError":
        """The same error with the name of the file."""
        return ScriptError(self.line, self.problem, source)


def all_problems(problems: Sequence[tuple[int, str]]) -> ScriptError:
    """One error with several problems, one a line.

    Args:
        problems: line of the script and sentence of each; at least one.
    """
    (line, first), *others = list(dict.fromkeys(problems))
    also = "".join(f"\nalso: {f'line {number}: ' if number else ''}{problem}" for number, problem in others)
    return ScriptError(line, f"{first}{also}")
