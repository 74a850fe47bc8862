"""The pairs of all keys while they grow in the journal, where every shard goes as soon as its content is in them.

So the disk never holds more than SAVE_BYTES of tokens twice, and at the end the tables of the index. What is joined is
known by a file that is written when it is on the disk, and before its shards are removed; what was written after that,
until a kill, is cut off and joined once more.
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
from trainer.data.indexed.parts import PairParts, PartFiles
from trainer.data.indexed.writer import PairChecksums, flush_to_disk
from trainer.data.prepare.chunk_work import shard_path
from trainer.data.prepare.part_file import Footer
from trainer.data.prepare.progress import say

SAVE_BYTES = 64 << 20
"""Of tokens, between two states that are on the disk: a second of writing."""
_STATE = "joined.json"
_BUFFER = 1 << 20
_MANY_BYTES = 1 << 30


@dataclass
class JoinState:
    """What is joined.

    Attributes:
        chunks: how many, from the first.
        sizes: of each key's tokens, lengths and document ends, in bytes.
        footer: of all of them together.
        named: the first documents that were passed over: where, and what is wrong.
        lines: of the last file that was begun.
        is_finished: all chunks are in the pairs, which may be in place already.
    """

    chunks: int = 0
    sizes: list[tuple[int, int, int]] = field(default_factory=list)
    footer: Footer = field(default_factory=Footer)
    named: list[str] = field(default_factory=list)
    lines: int = 0
    is_finished: bool = False


def joined_chunks(folder: Path) -> int:
    """How many chunks have no shard in ``folder`` any more, as they are joined; of other nodes, too.

    Raises:
        DataError: what says it is damaged.
    """
    state = _read(folder)
    return 0 if state is None else state.chunks


def _read(folder: Path) -> JoinState | None:
    path = folder / _STATE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return JoinState(**{**values, "footer": Footer(**values["footer"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{path}: is damaged; remove {folder.parent} to begin anew") from None


def forget(folder: Path) -> None:
    """Nothing is joined any more: what lies in ``folder`` is about to go."""
    (folder / _STATE).unlink(missing_ok=True)


class Joining:
    """The pairs in ``folder``, as far as they are joined.

    Args:
        folder: of the shards.
        code: of the tokens' dtype.
        prefixes: of the pairs when they are finished, one per key.

    Raises:
        DataError: a file is not as it was left.
        OSError: the files cannot be made.
    """

    def __init__(self, folder: Path, code: int, prefixes: Sequence[Path]) -> None:
        self._folder = folder
        self._inside = [folder / f"joined-{key}" for key in range(len(prefixes))]
        self._prefixes = prefixes
        state = _read(folder)
        empty = Footer(text_bytes=[0] * len(prefixes), largest=[-1] * len(prefixes))
        self.state = state or JoinState(sizes=[(0, 0, 0)] * len(prefixes), footer=empty)
        self._saved = self.state.chunks
        self._since = 0
        self._files = ExitStack()
        joined = sum(tokens for tokens, _, _ in self.state.sizes)
        if joined >= _MANY_BYTES:
            say(f"{folder.parent}: reading {joined / 1e9:,.3g} GB that are joined already")
        try:
            self._opened = [self._open(key, is_left=state is not None) for key in range(len(prefixes))]
            names = [files_of(prefix)[0] for prefix in prefixes]
            self.pairs = [PairParts(name, opened, code) for name, opened in zip(names, self._opened, strict=True)]
        except BaseException:
            self._files.close()
            raise
        self._remove_shards(0)

    def _open(self, key: int, is_left: bool) -> PartFiles:
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
        return PartFiles(*opened)

    def _take_back(self, key: int, tokens: Path) -> None:
        """A kill came while finished pairs were put in place; the index goes first, as it would be without tokens."""
        there, index = files_of(self._prefixes[key])
        is_there = self.state.is_finished and there.exists()
        if not is_there or there.stat().st_size != self.state.sizes[key][0]:
            raise _damaged(tokens)
        manifest_path(self._prefixes[key]).unlink(missing_ok=True)
        index.unlink(missing_ok=True)
        there.replace(tokens)

    def add(self, shard_bytes: int) -> None:
        """All of the next chunk is in the pairs, and its shard of so many bytes will not be needed again.

        Raises:
            OSError: the disk is full; what was joined before is kept.
        """
        self.state.chunks += 1
        self._since += shard_bytes
        # Where there is little room, the shard that was joined makes some for the next.
        if self._since >= SAVE_BYTES or disk_usage(self._folder).free < 2 * SAVE_BYTES:
            self.save()

    def save(self) -> None:
        """Make what is joined last, and remove its shards.

        Raises:
            OSError: the disk is full; what was joined before is kept.
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
        self._remove_shards(self._saved)
        self._saved, self._since = self.state.chunks, 0

    def _remove_shards(self, first: int) -> None:
        for number in range(first, self.state.chunks):
            shard_path(self._folder, number).unlink(missing_ok=True)

    def finish(self) -> list[tuple[Path, PairChecksums]]:
        """Write the indexes; gives where each pair lies, under a name of its own, and its checksums.

        Raises:
            OSError: the disk is full; what was joined is kept.
        """
        self.state.is_finished = True
        self.save()
        finished = []
        for pair, inside in zip(self.pairs, self._inside, strict=True):
            with files_of(inside)[1].open("wb") as index:
                checksums = PairChecksums(pair.tokens_sha256, pair.write_index(index))
                flush_to_disk(index)
            finished.append((inside, checksums))
        return finished

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What did not fit on the disk is written once more by closing, which closes all the same.
        with suppress(OSError):
            self._files.close()


def _damaged(path: Path) -> DataError:
    return DataError(f"{path}: is not as it was left; remove {path.parent.parent} to begin anew")


def put_in_place(finished: Path, prefix: Path) -> None:
    """Rename the three files. What was there goes index first, that no two halves ever look whole."""
    manifest_path(prefix).unlink(missing_ok=True)
    files_of(prefix)[1].unlink(missing_ok=True)
    for here, there in zip(files_of(finished), files_of(prefix), strict=True):
        here.replace(there)
    manifest_path(finished).replace(manifest_path(prefix))
    flush_folder(prefix.parent)


def flush_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    # Some systems cannot open a folder, and need not.
    with suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
