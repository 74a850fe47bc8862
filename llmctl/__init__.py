"""llmctl: submits, follows, records and resumes jobs. Never imports torch.

The names below are the Python API, see docs/guide/python-api.md. They are imported at their first use: this module is
imported by every command.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.9.0"

if TYPE_CHECKING:
    from llmctl.api.planning import plan
    from llmctl.api.running import Run, run, runs
    from llmctl.api.submitting import DryRun, dry_run, submit
    from llmctl.errors import (
        ConfigFileError,
        FollowedRunFailed,
        LlmctlError,
        ProfileError,
        RecordError,
        SchedulerError,
        UsageError,
        WaitTimeout,
    )
    from llmctl.job_state import JobState
    from llmctl.operate.cancel import Cancelled
    from llmctl.operate.history import PastRun
    from llmctl.runs.view import RunView
    from llmctl.submit.preview.predict import Prediction

__all__ = [
    "Cancelled",
    "ConfigFileError",
    "DryRun",
    "FollowedRunFailed",
    "JobState",
    "LlmctlError",
    "PastRun",
    "Prediction",
    "ProfileError",
    "RecordError",
    "Run",
    "RunView",
    "SchedulerError",
    "UsageError",
    "WaitTimeout",
    "__version__",
    "dry_run",
    "plan",
    "run",
    "runs",
    "submit",
]

_PLACES = {
    "llmctl.api.planning": ("plan",),
    "llmctl.api.running": ("Run", "run", "runs"),
    "llmctl.api.submitting": ("DryRun", "dry_run", "submit"),
    "llmctl.errors": (
        *("ConfigFileError", "FollowedRunFailed", "LlmctlError", "ProfileError", "RecordError", "SchedulerError"),
        *("UsageError", "WaitTimeout"),
    ),
    "llmctl.job_state": ("JobState",),
    "llmctl.operate.cancel": ("Cancelled",),
    "llmctl.operate.history": ("PastRun",),
    "llmctl.runs.view": ("RunView",),
    "llmctl.submit.preview.predict": ("Prediction",),
}


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package, in which ``submit`` and ``runs`` are functions of the API.

    Packages inside have these names too, and Python would put them in the place of the functions once it has imported
    them. ``from llmctl.submit.plan import ...`` finds them by their path.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
