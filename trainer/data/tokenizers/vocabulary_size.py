"""Sizes that a vocabulary cannot have, said in one sentence."""

from __future__ import annotations

from trainer.data.errors import DataError

LARGEST = (1 << 31) - 1
"""Ids are 31 bits wide in the files that tokens are kept in."""


def check_size(vocab_size: int, smallest: int, holds: str) -> None:
    """Refuse a size that no text can fill.

    Args:
        vocab_size: that is asked for.
        smallest: that can be.
        holds: what a vocabulary of that size holds.

    Raises:
        DataError: it is below ``smallest``, or above LARGEST.
    """
    if vocab_size < smallest:
        raise DataError(f"--vocab-size: {vocab_size} is below {smallest}: {holds}; raise it")
    if vocab_size > LARGEST:
        raise DataError(f"--vocab-size: {vocab_size} is above {LARGEST}, the largest id; lower it")


def too_little_text(found: int, vocab_size: int, smallest: int, holds: str) -> DataError:
    """What to say where a text yields only ``found`` tokens, all of which a vocabulary of that size would hold."""
    lower = f"lower it to {found} or " if found >= smallest else ""
    more = "" if lower else f" (the smallest vocabulary has {smallest}: {holds})"
    return DataError(
        f"--vocab-size: the text yields only {found} tokens of the {vocab_size} asked for; {lower}give more text{more}"
    )
