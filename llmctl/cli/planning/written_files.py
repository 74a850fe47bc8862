"""Files that commands of planning write for the user."""

from pathlib import Path

from llmctl.context import Context
from llmctl.errors import ConfigFileError, UsageError


def output_file(context: Context, flag: str, value: str | None) -> Path | None:
    """The file that a flag names; None without the flag.

    Raises:
        UsageError: it cannot be written, which is told before any job is submitted.
    """
    if value is None:
        return None
    target = context.cwd / Path(value).expanduser()
    if target.is_dir() or not target.parent.is_dir():
        raise UsageError(f"{flag} {value}: cannot be written; name a file in an existing folder")
    return target


def write_file(path: Path, flag: str, text: str) -> None:
    """Write a file that ``flag`` has named.

    Raises:
        ConfigFileError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigFileError(f"{flag} {path}: cannot be written: {error.strerror}") from None
