"""One file per scheduler, found by name. Only the one that is asked for is imported."""

import importlib

from llmctl.backends.base import Backend

MODULES = {"local": "llmctl.backends.local"}
"""Scheduler, as profiles name it -> the module whose ``BACKEND`` knows it."""


def load_backend(scheduler: str) -> Backend:
    """The backend of a scheduler that MODULES names."""
    backend: Backend = importlib.import_module(MODULES[scheduler]).BACKEND
    return backend
