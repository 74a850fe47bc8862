"""Checks of the functions that a config names in the files of ``job.code``: their text is read, nothing is run."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmctl.submit.job import Problem
from trainer.config.sections.functions import PARAMETERS
from trainer.config.train_config import TrainConfig


def function_problems(config: TrainConfig, files: Mapping[str, Path]) -> Iterator[Problem]:
    """A module or function that ``job.code`` should have and has not, or a function with other parameters.

    A module whose first package is not in ``job.code`` may be installed on the cluster, and is not judged.

    Args:
        config: with the functions.
        files: of ``job.code``, by their names below the folder that Python imports from.
    """
    for key, place in _named_functions(config):
        module, _, name = place.partition(":")
        text = _function_problem(module, name, PARAMETERS[key], files)
        if text:
            yield Problem(key, f"{place}: {text}", also=("job.code",))


def _named_functions(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Key and ``module:function`` of each function."""
    for key in PARAMETERS:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        yield from ((key, place) for place in ([value] if isinstance(value, str) else value or ()))


def _function_problem(module: str, name: str, parameters: str, files: Mapping[str, Path]) -> str:
    path = module.replace(".", "/")
    top = path.partition("/")[0]
    file = files.get(f"{path}/__init__.py") or files.get(f"{path}.py")
    if file is None:
        if f"{top}/__init__.py" not in files and f"{top}.py" not in files:
            return ""
        return f"job.code has {top}, but no module {module}; name one that it has"
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return f"{file}{where} is not valid Python: {getattr(error, 'msg', error)}"
    found = _definitions(tree)
    if name not in found:
        return "" if _OPEN in found else f"{file} has no function {name}; name one that it has"
    function = found[name]
    count = parameters.count(",") + 1 if parameters else 0
    if isinstance(function, ast.FunctionDef) and not function.decorator_list and not _takes(function.args, count):
        return f"is called as {name}({parameters}), but has the parameters ({ast.unparse(function.args)})"
    return ""


_OPEN = "*"
"""Stands for any name: of a star import or a module's __getattr__."""


def _definitions(tree: ast.Module) -> dict[str, ast.AST]:
    """Names that the text of a module binds, with their definitions: also below ``if``, ``try``, ``with`` and loops."""
    found: dict[str, ast.AST] = {}
    inner: list[ast.AST] = [*tree.body]
    for node in inner:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            # One of two branches may define it: neither definition is judged.
            found[node.name] = tree if node.name in found else node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found[node.id] = node
        else:
            inner += ast.iter_child_nodes(node)
    if "__getattr__" in found or any(isinstance(node, ast.Name) and node.id == "globals" for node in ast.walk(tree)):
        found[_OPEN] = tree
    return found


def _takes(arguments: ast.arguments, count: int) -> bool:
    """True unless a call with this number of positional arguments must fail."""
    positional = len(arguments.posonlyargs) + len(arguments.args)
    needed = positional - len(arguments.defaults)
    keywords_have_defaults = None not in arguments.kw_defaults
    return needed <= count and (count <= positional or arguments.vararg is not None) and keywords_have_defaults
