"""Text of samples on standard output, whatever that is."""

from __future__ import annotations

import os
import sys


def print_text(text: str) -> None:
    """Print a line or more; characters that the terminal's encoding has not got are spelled out.

    Whoever reads it may stop, as ``head`` does: https://docs.python.org/3/library/signal.html#note-on-sigpipe.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # Else the interpreter would complain when it flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
