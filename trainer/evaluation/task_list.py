"""Tasks of lm-evaluation-harness by name or file: found, checked and loaded. Needs no torch.

Files: github.com/EleutherAI/lm-evaluation-harness, docs/task_guide.md.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.config.paths.task_files import is_task_file, task_file_problem
from trainer.evaluation.errors import EvaluationError

_NEAREST = 3


def task_specs(text: str) -> list[str]:
    """The names and files of a list with commas.

    Raises:
        EvaluationError: the list is empty.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise EvaluationError(
            "--tasks: names no task; give names, or files that end in .yaml, with commas between them"
        )
    return found


def check_tasks(specs: Sequence[str], where: str = "--tasks") -> None:
    """Check that the harness is installed, and that every task is there. Loads no data.

    Args:
        specs: names and files.
        where: flag or key that has them, for messages.

    Raises:
        EvaluationError: names the first task that is unknown or whose file is missing, and what is valid.
    """
    if find_spec("lm_eval") is None:
        raise EvaluationError(f"{where}: needs the package lm-eval; install it: pip install lm-eval")
    for spec in specs:
        if is_task_file(spec):
            _check_file(Path(spec).expanduser(), f"{where}: {spec}")
    names = [spec for spec in specs if not is_task_file(spec)]
    if names:
        _check_names(names, _manager(has_names=True).all_tasks, where)


def load_tasks(specs: Sequence[str], where: str = "--tasks") -> Any:
    """The harness's tasks with their data. A file's own data files are relative to the file.

    Args:
        specs: names and files.
        where: flag or key that has them, for messages.

    Raises:
        EvaluationError: a task is unknown, or the harness cannot load it or its data.
    """
    check_tasks(specs, where)
    manager = _manager(has_names=any(not is_task_file(spec) for spec in specs))
    loaded = []
    for spec in specs:
        try:
            loaded.append(manager.load([_content(Path(spec).expanduser()) if is_task_file(spec) else spec]))
        # The harness has no common error: a wrong key, a wrong template and missing data raise as they come.
        except Exception as error:
            raise EvaluationError(
                f"{where}: {spec} cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error
    tasks = {name: task for one in loaded for name, task in one["tasks"].items()}
    if len(tasks) < sum(len(one["tasks"]) for one in loaded):
        raise EvaluationError(f"{where}: {','.join(specs)} names a task twice; give each task once")
    merged: dict[str, dict[str, Any]] = {"tasks": tasks, "groups": {}, "group_map": {}}
    for one in loaded:
        merged["groups"] |= one["groups"]
        merged["group_map"] |= one["group_map"]
    return merged


def continues_text(tasks: Any) -> str | None:
    """Name of a task of ``load_tasks`` that generates text; None if all only score."""
    return next((name for name, task in tasks["tasks"].items() if task.OUTPUT_TYPE == "generate_until"), None)


def _check_file(path: Path, where: str) -> None:
    if not path.is_file():
        raise EvaluationError(f"{where}: there is no such file")
    try:
        problem = task_file_problem(path.read_bytes())
    except OSError as error:
        problem = error.strerror or str(error)
    if problem is not None:
        raise EvaluationError(f"{where} cannot be loaded: {problem}; name a task file of lm-evaluation-harness")


@functools.cache
def _manager(*, has_names: bool) -> Any:
    """The harness's index. Its own tasks are thousands of files, which take many seconds to list."""
    from datasets import disable_progress_bars
    from lm_eval.tasks import TaskManager

    # They would run through the lines of a log.
    disable_progress_bars()

    return TaskManager(include_defaults=has_names)


def _check_names(names: Sequence[str], valid: Sequence[str], where: str) -> None:
    unknown = next((name for name in names if name not in valid), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, valid, _NEAREST, 0.3) or sorted(valid)[:_NEAREST]
        raise EvaluationError(
            f"{where}: {unknown!r} is none of the {len(valid)} tasks of lm-eval, such as {', '.join(near)}; "
            "`lm-eval ls tasks` lists all, and a file's name ends in .yaml"
        )


def _content(path: Path) -> dict[str, Any]:
    """Content of a task file with absolute paths of data files."""
    from lm_eval.tasks._yaml_loader import load_yaml

    content: dict[str, Any] = load_yaml(path)
    options = content.get("dataset_kwargs")
    if isinstance(options, dict) and "data_files" in options:
        options["data_files"] = _absolute(options["data_files"], path.parent)
    return content


def _absolute(files: Any, folder: Path) -> Any:
    if isinstance(files, dict):
        return {split: _absolute(names, folder) for split, names in files.items()}
    if isinstance(files, list):
        return [_absolute(name, folder) for name in files]
    return files if "://" in str(files) else str(folder.resolve() / str(files))
