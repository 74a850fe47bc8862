"""Whether text is still what it was when a checkpoint was written, found out by reading a little of it.

Names and sizes are compared before (Pieces.fingerprint). What is left are edits that keep a file's size. Up to
``WHOLE_BYTES`` of text are read whole: all of them are refused when a run goes on. Of more that much is read, in blocks
from the beginning of each file to its end: where compressed files have their own checksum and Parquet files the sizes
of all columns. An edit between the blocks

- in text that the run had read, whether trained on or read ahead, is refused when it is read again, before it changes a
  batch: at once in the block that the run goes on in, and of the rest in the next epoch (seen_text);
- in text that it had not read is known by the time of the file alone, which copying and touching change, too: it is
  told, and not refused. Where the time was put back as well it goes unnoticed, and the run takes what it finds;
- in documents of the splits for evaluation is known by that time, too: what they gave is not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.errors import DataError
from trainer.data.prepare.inputs import InputFile

WHOLE_BYTES = 64 << 20
"""Read in 0.1 s where it is in memory, and 1 s over a network."""
_BLOCK = 16 << 10
_READ = 1 << 20
MOST_MARKS = 1024
"""So many stand in a checkpoint; of more files several share one."""
_MOST_READ = 1 << 16
"""Of more files every second one, every third one, ... is opened."""


@dataclass(frozen=True)
class TextMark:
    """What is kept of some files that follow each other.

    Attributes:
        digest: BLAKE2b of what was read of them. No CRC: a compressed file that ends with its own keeps it.
        written_us: when the last of them was written to, in microseconds: JSON has no numbers of 64 bits.
    """

    digest: str
    written_us: int


class MarkedText:
    """The files of a stream, with what tells that they are the same ones later on."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        """Read what is compared of ``files``.

        Raises:
            DataError: a file cannot be read.
        """
        self._groups = list(_groups(files))
        self._is_whole = sum(file.size for file in files) <= WHOLE_BYTES and len(files) <= _MOST_READ
        most = WHOLE_BYTES if self._is_whole else WHOLE_BYTES // min(len(files), _MOST_READ)
        step = -(-len(files) // _MOST_READ)
        self._marks = [
            TextMark(_digest(group[::step], most), max(file.mtime_ns for file in group) // 1000)
            for group in self._groups
        ]

    def state(self) -> list[list[str | int]]:
        """Plain values for a checkpoint."""
        return [[mark.digest, mark.written_us] for mark in self._marks]

    def compare(self, state: Any) -> str | None:
        """Refuse files that are not those of ``state``, a checkpoint's, of the same names and sizes.

        Returns:
            A line about files that were written to since, and may have been edited; None: there is nothing to say.

        Raises:
            DataError: names the first that was edited; or ``state`` is damaged.
        """
        try:
            before = [TextMark(str(digest), int(written)) for digest, written in state]
        except (TypeError, ValueError):
            before = []
        if len(before) != len(self._marks):
            raise DataError(
                "data.streaming: what the checkpoint says of its text is damaged, or of another version; go on from "
                "another checkpoint, or with the version that wrote it"
            )
        told: str | None = None
        for group, mark, former in zip(self._groups, self._marks, before, strict=True):
            if mark.digest != former.digest:
                raise DataError(
                    f"data.streaming: {_named(group)} was edited since the checkpoint was written, with the same size "
                    "but other text, and samples would be others; bring the former file back, or begin another run "
                    "with the weights, by checkpoint.load and checkpoint.finetune"
                )
            if mark.written_us != former.written_us and not self._is_whole and told is None:
                told = (
                    f"{_named(group)} was written to since the checkpoint; the parts of it that were compared are "
                    "the same"
                )
        return told


def _groups(files: Sequence[InputFile]) -> Iterator[Sequence[InputFile]]:
    size = max(1, -(-len(files) // MOST_MARKS))
    for first in range(0, len(files), size):
        yield files[first : first + size]


def _named(group: Sequence[InputFile]) -> str:
    return group[0].path + (f" or one of the {len(group) - 1:,} files after it" if len(group) > 1 else "")


def _digest(files: Sequence[InputFile], most: int) -> str:
    """Of ``files``, of each of them of at most ``most`` bytes."""
    found = hashlib.blake2b(digest_size=8)
    for file in files:
        try:
            for content in _contents(file, most):
                found.update(content)
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read: {error.strerror}") from None
    return found.hexdigest()


def _contents(file: InputFile, most: int) -> Iterator[bytes]:
    with Path(file.path).open("rb", buffering=_BLOCK) as stream:
        if file.size <= most:
            while content := stream.read(_READ):
                yield content
            return
        block = min(_BLOCK, most)
        last, gaps = file.size - block, most // block - 1
        for number in range(gaps + 1):
            # A single one is the last.
            stream.seek(last * number // gaps if gaps else last)
            yield stream.read(block)
