"""Reading of YAML files: configs, profiles. Torch-free."""

from pathlib import Path
from typing import Any

import yaml

from trainer.config.errors import ConfigError


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping of a YAML file, without checking the values.

    Raises:
        ConfigError: the file cannot be read, is not YAML, repeats a key, or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError("", f"cannot be read: {error}") from None
    return parse_yaml(text)


def parse_yaml(text: str) -> dict[str, Any]:
    """Read a mapping from YAML, without checking the values.

    Raises:
        ConfigError: the text is not YAML, repeats a key, or is not a mapping.
    """

    class UniqueKeyLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Refuses a repeated key; PyYAML would silently keep the last value."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise yaml.MarkedYAMLError(problem=f"key {twice!r} occurs twice", problem_mark=node.start_mark)
            return dict(super().construct_mapping(node, deep))

    try:
        values = yaml.load(text, UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError("", f"is not valid YAML: {_place_and_problem(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError("", f"is not valid YAML: {' '.join(str(error).split())}") from None
    except (RecursionError, ValueError) as error:
        # Python refuses integers of more than 4,300 digits.
        raise ConfigError("", f"cannot be read: {str(error).partition(';')[0]}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        what = "is empty, " if values is None else "is a list, " if isinstance(values, list) else "is "
        raise ConfigError("", f"{what}not a mapping of names to values")
    return values


def _place_and_problem(error: yaml.MarkedYAMLError) -> str:
    """Line, column and words of an error, in one line."""
    mark, problem = error.problem_mark, " ".join(str(error.problem or error).split())
    if problem == "found character that cannot start any token":
        problem = "a word may not begin with this character; quote it, and indent with spaces, not tabs"
    began = error.context_mark
    if began is not None and mark is not None and began.line != mark.line:
        problem += f" ({error.context}, which begins in line {began.line + 1})"
    return problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
