"""One resume or cancel of a run at a time, so that two of them cannot start or miss a job between look and act."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmctl.errors import RecordError


@contextmanager
def lock_file(path: str, take: Callable[[str], int], release: Callable[[int], None]) -> Iterator[None]:
    """Hold the lock file of a run; ``take`` and ``release`` do it where the file is (see file_acts).

    Raises:
        RecordError: another llmctl holds it, or its folder cannot be written.
    """
    folder = Path(path).parent
    try:
        lock = take(path)
    except BlockingIOError:
        raise RecordError(
            f"{folder.name} is being resumed or cancelled by another llmctl; try again when it is done"
        ) from None
    except OSError as error:
        raise RecordError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        release(lock)
