"""One resume or cancel of a run at a time, so that two of them cannot start or miss a job between look and act."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmctl.errors import RecordError


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run; the kernel lets go of it when this process ends, however it does (flock(2)).

    Raises:
        RecordError: another llmctl holds it, or the run directory cannot be written.
    """
    try:
        descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RecordError(f"{run_dir}: cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(
                f"{run_dir.name} is being resumed or cancelled by another llmctl; try again when it is done"
            ) from None
        yield
    finally:
        os.close(descriptor)
