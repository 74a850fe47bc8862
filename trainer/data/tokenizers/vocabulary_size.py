"""Checks of vocabulary sizes, and their error messages."""

from __future__ import annotations

from trainer.data.errors import DataError

LARGEST = (1 << 31) - 1
"""Largest id: the files of tokens hold 31-bit ids."""


def check_size(vocab_size: int, smallest: int, holds: str) -> None:
    """Reject a size that no text can fill.

    Args:
        vocab_size: requested size.
        smallest: smallest valid size.
        holds: description of the smallest vocabulary.

    Raises:
        DataError: the size is below ``smallest``, or above LARGEST.
    """
    if vocab_size < smallest:
        raise DataError(f"--vocab-size: {vocab_size} is below {smallest}: {holds}; raise it")
    if vocab_size > LARGEST:
        raise DataError(f"--vocab-size: {vocab_size} is above {LARGEST}, the largest id; lower it")


def too_little_text(found: int, vocab_size: int, smallest: int, holds: str) -> DataError:
    """Return the error for a text that yields only ``found`` tokens.

    The message advises this size if it is valid.
    """
    lower = f"lower it to {found} or " if found >= smallest else ""
    more = "" if lower else f" (the smallest vocabulary has {smallest}: {holds})"
    return DataError(
        f"--vocab-size: the text yields only {found} of the {vocab_size} requested tokens; {lower}give more text{more}"
    )
