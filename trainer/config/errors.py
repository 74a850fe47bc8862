"""Error for an invalid training config. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """Invalid values of the training config.

    Attributes:
        key: dotted key of the value, such as ``parallel.tensor_model_parallel_size``; empty if no key can be named.
        problem: one sentence: what is wrong, what is valid, what to do. Names no file, which only the caller knows.
        others: further problems, each of another key; ``str`` has a line for each.
    """

    def __init__(self, key: str, problem: str, others: Sequence[ConfigError] = ()) -> None:
        super().__init__("\nalso: ".join([f"{key}: {problem}" if key else problem, *map(str, others)]))
        self.key = key
        self.problem = problem
        self.others = tuple(others)

    @property
    def all(self) -> tuple[ConfigError, ...]:
        """This problem and the others."""
        return (self, *self.others)


def joined(problems: Iterable[ConfigError]) -> ConfigError:
    """One error for all problems, at least one: the first of each key."""
    found: dict[str, str] = {}
    for problem in problems:
        for error in problem.all:
            found.setdefault(error.key, error.problem)
    (key, text), *others = found.items()
    return ConfigError(key, text, [ConfigError(*other) for other in others])
