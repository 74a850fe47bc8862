"""Backends, one file or folder per scheduler, found by name. Only the requested backend is imported."""

import importlib
from typing import cast

from llmctl.backends.base import Backend, Capabilities, QueueBackend
from llmctl.errors import ProfileError

MODULES = {
    "slurm": "llmctl.backends.slurm.backend",
    "sge": "llmctl.backends.sge.backend",
    "pbs": "llmctl.backends.pbs.backend",
    "lsf": "llmctl.backends.lsf.backend",
    "ssh": "llmctl.backends.ssh",
    "local": "llmctl.backends.local",
}
"""Scheduler, as named in profiles -> the module with its ``BACKEND``."""


def load_backend(scheduler: str) -> Backend:
    """Backend of a scheduler: a module of this package, or of an installed package.

    Raises:
        ProfileError: the scheduler has no backend, or the installed package's module cannot be imported.
    """
    if scheduler in MODULES:
        backend: Backend = importlib.import_module(MODULES[scheduler]).BACKEND
        return backend
    return _load_installed(scheduler)


def capabilities_of(scheduler: str) -> Capabilities:
    """Capabilities of a scheduler, by which llmctl decides.

    Raises:
        ProfileError: see ``load_backend``.
    """
    return load_backend(scheduler).capabilities


def load_queue_backend(scheduler: str) -> QueueBackend | None:
    """Backend of a scheduler with a queue; None for a scheduler that starts jobs directly.

    Raises:
        ProfileError: see ``load_backend``.
    """
    backend = load_backend(scheduler)
    return cast("QueueBackend", backend) if backend.capabilities.has_queue else None


def _load_installed(scheduler: str) -> Backend:
    from llmctl.site.profile_names import BACKEND_ENTRY_POINTS, installed_backends

    found = installed_backends().get(scheduler)
    if found is None:
        raise ProfileError(
            f"scheduler: {scheduler}: no installed package has an entry point of this name in {BACKEND_ENTRY_POINTS}; "
            f"install one, or choose {', '.join(MODULES)}"
        )
    try:
        return cast("Backend", found.load())
    except (ImportError, AttributeError) as error:
        raise ProfileError(
            f"scheduler: {scheduler}: its backend {found.value} cannot be imported: {error}; reinstall its package"
        ) from error
