"""One file per scheduler, found by name. Only the one that is asked for is imported."""

import importlib
from typing import cast

from llmctl.backends.base import Backend, QueueBackend

MODULES = {
    "slurm": "llmctl.backends.slurm.backend",
    "sge": "llmctl.backends.sge.backend",
    "pbs": "llmctl.backends.pbs.backend",
    "ssh": "llmctl.backends.ssh",
    "local": "llmctl.backends.local",
}
"""Scheduler, as profiles name it -> the module whose ``BACKEND`` knows it."""


def load_backend(scheduler: str) -> Backend:
    """The backend of a scheduler that MODULES names."""
    backend: Backend = importlib.import_module(MODULES[scheduler]).BACKEND
    return backend


def load_queue_backend(scheduler: str) -> QueueBackend | None:
    """The backend of a scheduler with a queue; None for one that starts jobs directly."""
    backend = load_backend(scheduler)
    return cast("QueueBackend", backend) if backend.has_queue else None
