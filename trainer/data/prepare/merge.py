"""Merge of part files into indexed datasets, which grow in the journal.

A part file is removed as soon as its content is merged, so the disk never holds more than SAVE_BYTES of tokens twice,
and at the end the tables of the index. A state file records how much is merged. The state file is written after the
data is on disk and before the part files are removed; data after the recorded size is truncated and merged again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import disk_usage
from types import TracebackType
from typing import BinaryIO

from typing_extensions import Self

from trainer.data.errors import DataError
from trainer.data.indexed.index_format import files_of
from trainer.data.indexed.manifest import manifest_path
from trainer.data.indexed.tables import IndexedDatasetTables, TableFiles
from trainer.data.indexed.writer import DatasetChecksums, flush_to_disk
from trainer.data.prepare.chunk_work import part_file_path
from trainer.data.prepare.part_file import Footer
from trainer.data.prepare.progress import say

SAVE_BYTES = 64 << 20
"""Bytes of tokens between two states on disk: about a second of writing."""
_STATE = "joined.json"
_BUFFER = 1 << 20
_MANY_BYTES = 1 << 30


@dataclass
class MergeState:
    """Progress of the merge.

    Attributes:
        chunks: number of merged chunks, from the first.
        sizes: bytes of each key's tokens, lengths and document ends.
        footer: summary of all merged chunks.
        named: first skipped documents, with place and reason.
        lines: number of lines so far of the current file.
        is_finished: all chunks are merged, and the datasets may already have their final names.
    """

    chunks: int = 0
    sizes: list[tuple[int, int, int]] = field(default_factory=list)
    footer: Footer = field(default_factory=Footer)
    named: list[str] = field(default_factory=list)
    lines: int = 0
    is_finished: bool = False


def merged_chunks(folder: Path) -> int:
    """Return the number of merged chunks of all nodes; their part files are removed.

    Raises:
        DataError: the state file is damaged.
    """
    state = _read(folder)
    return 0 if state is None else state.chunks


def _read(folder: Path) -> MergeState | None:
    path = folder / _STATE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return MergeState(**{**values, "footer": Footer(**values["footer"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{path}: is damaged; remove {folder.parent} to start over") from None


def forget(folder: Path) -> None:
    """Remove the state file of ``folder``, before the folder itself is removed."""
    (folder / _STATE).unlink(missing_ok=True)


class Merger:
    """The growing indexed datasets in ``folder``.

    Args:
        folder: folder of the part files.
        code: code of the tokens' dtype.
        prefixes: final prefixes of the datasets, one per key.

    Raises:
        DataError: a file is shorter than recorded.
        OSError: the files cannot be created.
    """

    def __init__(self, folder: Path, code: int, prefixes: Sequence[Path]) -> None:
        self._folder = folder
        self._inside = [folder / f"joined-{key}" for key in range(len(prefixes))]
        self._prefixes = prefixes
        state = _read(folder)
        empty = Footer(text_bytes=[0] * len(prefixes), largest=[-1] * len(prefixes))
        self.state = state or MergeState(sizes=[(0, 0, 0)] * len(prefixes), footer=empty)
        self._saved = self.state.chunks
        self._since = 0
        self._files = ExitStack()
        merged = sum(tokens for tokens, _, _ in self.state.sizes)
        if merged >= _MANY_BYTES:
            say(f"{folder.parent}: reading {merged / 1e9:,.3g} GB of merged tokens")
        try:
            self._opened = [self._open(key, is_left=state is not None) for key in range(len(prefixes))]
            names = [files_of(prefix)[0] for prefix in prefixes]
            self.tables = [
                IndexedDatasetTables(name, opened, code) for name, opened in zip(names, self._opened, strict=True)
            ]
        except BaseException:
            self._files.close()
            raise
        self._remove_part_files(0)

    def _open(self, key: int, is_left: bool) -> TableFiles:
        tokens = files_of(self._inside[key])[0]
        if is_left and not tokens.exists():
            self._take_back(key, tokens)
        opened: list[BinaryIO] = []
        paths = (tokens, *(self._inside[key].with_suffix(end) for end in (".lengths", ".documents")))
        for path, size in zip(paths, self.state.sizes[key], strict=True):
            if is_left and (not path.exists() or path.stat().st_size < size):
                raise _damaged(path)
            file = self._files.enter_context(path.open("r+b" if is_left else "w+b", buffering=_BUFFER))
            file.truncate(size)
            file.seek(size)
            opened.append(file)
        return TableFiles(*opened)

    def _take_back(self, key: int, tokens: Path) -> None:
        """Move tokens back after a kill during the final renames.

        The index goes first, so that it never lacks its tokens.
        """
        final, index = files_of(self._prefixes[key])
        is_final = self.state.is_finished and final.exists()
        if not is_final or final.stat().st_size != self.state.sizes[key][0]:
            raise _damaged(tokens)
        manifest_path(self._prefixes[key]).unlink(missing_ok=True)
        index.unlink(missing_ok=True)
        final.replace(tokens)

    def add(self, part_file_bytes: int) -> None:
        """Count the next chunk as appended; its part file can be removed.

        Raises:
            OSError: the disk is full; earlier merged chunks are kept.
        """
        self.state.chunks += 1
        self._since += part_file_bytes
        # On a nearly full disk, save at once: each removed part file makes room for the next.
        if self._since >= SAVE_BYTES or disk_usage(self._folder).free < 2 * SAVE_BYTES:
            self.save()

    def save(self) -> None:
        """Flush merged data and state to disk, then remove the merged part files.

        Raises:
            OSError: the disk is full; earlier merged chunks are kept.
        """
        for files in self._opened:
            for file in files:
                flush_to_disk(file)
        self.state.sizes = [
            (files.tokens.tell(), files.lengths.tell(), files.documents.tell()) for files in self._opened
        ]
        partial = self._folder / f"{_STATE}.{os.getpid()}.partial"
        try:
            with partial.open("wb") as file:
                file.write(json.dumps(asdict(self.state)).encode())
                flush_to_disk(file)
            partial.replace(self._folder / _STATE)
        finally:
            partial.unlink(missing_ok=True)
        flush_folder(self._folder)
        self._remove_part_files(self._saved)
        self._saved, self._since = self.state.chunks, 0

    def _remove_part_files(self, first: int) -> None:
        for number in range(first, self.state.chunks):
            part_file_path(self._folder, number).unlink(missing_ok=True)

    def finish(self) -> list[tuple[Path, DatasetChecksums]]:
        """Write the indexes; return each dataset's temporary prefix and checksums.

        Raises:
            OSError: the disk is full; the merged chunks are kept.
        """
        self.state.is_finished = True
        self.save()
        finished = []
        for tables, inside in zip(self.tables, self._inside, strict=True):
            with files_of(inside)[1].open("wb") as index:
                checksums = DatasetChecksums(tables.tokens_sha256, tables.write_index(index))
                flush_to_disk(index)
            finished.append((inside, checksums))
        return finished

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a full disk, close() tries to write the buffer again and fails, but closes the file all the same.
        with suppress(OSError):
            self._files.close()


def _damaged(path: Path) -> DataError:
    return DataError(f"{path}: is missing or shorter than recorded; remove {path.parent.parent} to start over")


def put_in_place(finished: Path, prefix: Path) -> None:
    """Rename the three files of a dataset.

    The old index is removed first, so that a mixture of old and new files never looks complete.
    """
    manifest_path(prefix).unlink(missing_ok=True)
    files_of(prefix)[1].unlink(missing_ok=True)
    for source, target in zip(files_of(finished), files_of(prefix), strict=True):
        source.replace(target)
    manifest_path(finished).replace(manifest_path(prefix))
    flush_folder(prefix.parent)


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    # Some systems cannot open a folder, and do not need the flush.
    with suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
