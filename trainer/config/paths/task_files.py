"""Task files of lm-evaluation-harness, as far as they can be checked without the harness. Torch-free."""

from __future__ import annotations

_SUFFIXES = (".yaml", ".yml")


def is_task_file(task: str) -> bool:
    """True if ``task`` names a file, and not a task of the harness."""
    return task.endswith(_SUFFIXES) or "/" in task


def task_file_problem(content: bytes) -> str | None:
    """Words on a file that is not a task; None for a YAML mapping. Runs no code that the file names."""
    # Few configs name task files, and every training reads this module.
    import yaml

    try:
        # Not built into values: tags such as !function are the harness's.
        node = yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        return f"it is not valid YAML: {line}{error.problem}"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return f"it is not valid YAML: {' '.join(str(error).split())}"
    return None if isinstance(node, yaml.MappingNode) else "it has no keys of a task"
