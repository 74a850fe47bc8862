"""Files that a command writes anew, in the place of its own earlier ones only."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from llmctl.errors import ConfigFileError, UsageError


def check_ours(target: Path, mark: bytes, what: str) -> None:
    """Refuse a file that the command has not written, before it does any work.

    Args:
        target: file to write; may be absent.
        mark: words that every file of the command has.
        what: a file of the command, for the message.

    Raises:
        UsageError: the file is another one, or cannot be read.
    """
    try:
        is_ours = mark in target.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"--output {target}: cannot be written: {error.strerror}") from None
    if not is_ours:
        raise UsageError(f"--output {target}: exists, and is not {what}; name another file")


def replace_file(target: Path, content: bytes) -> None:
    """Write aside and rename: a reader never sees half a file.

    Raises:
        ConfigFileError: the file cannot be written.
    """
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".llmctl-", suffix=target.suffix)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                Path(temporary).unlink()
        raise ConfigFileError(f"--output {target}: cannot be written: {error.strerror}") from None
