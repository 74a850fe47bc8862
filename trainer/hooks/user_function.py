"""User functions: imported by their name, checked, and named in their errors. Torch-free."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.sections.functions import PARAMETERS


class HookError(Exception):
    """A user's function has failed; ``__cause__`` is its own error, if any."""


@dataclass(frozen=True)
class UserFunction:
    """A function of the user's own.

    Attributes:
        key: of the config.
        place: ``module:function``.
        function: the function.
    """

    key: str
    place: str
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """Name of the function alone."""
        return self.place.partition(":")[2]

    def __call__(self, *arguments: Any) -> Any:
        """Call the function.

        Raises:
            HookError: the function has raised an error.
        """
        try:
            return self.function(*arguments)
        except Exception as error:
            raise self.error(f"failed: {type(error).__name__}: {error}") from error

    def error(self, problem: str) -> HookError:
        """The error that names this function."""
        return HookError(f"{self.key}: {self.place} {problem}")


def load_function(key: str, place: str) -> UserFunction:
    """Import the function ``module:function``.

    Args:
        key: of PARAMETERS, which has the parameters of the call.
        place: ``module:function``; the config has checked the form.

    Raises:
        ConfigError: there is no such function, or it has other parameters.
    """
    module_name, _, function_name = place.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            key,
            f"{place}: {module_name} cannot be imported ({type(error).__name__}: {error}); name a module of job.code, "
            "of PYTHONPATH or of an installed package",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(key, f"{place}: {module_name} has no function {function_name}; name one that it has")
    parameters = PARAMETERS[key]
    if not _takes(function, parameters.count(",") + 1 if parameters else 0):
        has = inspect.signature(function)
        raise ConfigError(key, f"{place} is called as {function_name}({parameters}), but has the parameters {has}")
    return UserFunction(key, place, function)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """True unless a call with this number of positional arguments must fail."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C code may have none
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
