"""Journal of an unfinished preparation: its plan, its finished chunks, and a lock."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.errors import DataError
from trainer.data.indexed.cache_entry import LEFT_OVER_SECONDS, remove_older
from trainer.data.indexed.lock_holder import holders_of, name_holder
from trainer.data.prepare.chunk_work import part_file_path
from trainer.data.prepare.chunks import TextDocument
from trainer.data.prepare.encoding import Recipe
from trainer.data.prepare.inputs import InputFile
from trainer.data.prepare.merge import forget, merged_chunks
from trainer.data.prepare.node_status import NodeStatusFiles

_PLAN = "plan.json"
_PART_FILE = re.compile(r"(\d{8,})\.shard")


@dataclass(frozen=True)
class Plan:
    """All options that determine the bytes of the output.

    A preparation resumes only with the same plan.

    Attributes:
        tokenizer_sha256: fingerprint.
        vocab_size: vocabulary size of the tokenizer.
        eod: token appended to documents; None to append none.
        recipe: conversion of a document to sequences.
        text_document: unit of plain text that makes a document.
        chunk_bytes: text bytes per chunk.
        inputs: input files.
    """

    tokenizer_sha256: str
    vocab_size: int
    eod: int | None
    recipe: Recipe
    text_document: TextDocument
    chunk_bytes: int
    inputs: tuple[InputFile, ...]

    def as_plain(self) -> dict[str, Any]:
        """Return the content of the plan file."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {"schema": 1, **plain, "inputs": [[file.path, file.size, file.mtime_ns] for file in self.inputs]}

    @property
    def digest(self) -> str:
        """Digest that identifies the plan."""
        return hashlib.sha256(json.dumps(self.as_plain(), sort_keys=True).encode()).hexdigest()[:16]


class Journal:
    """The folder ``<prefix>.preparing``.

    ``held`` creates the folder. It is kept after an error, so that the work can resume.
    Part files lie in a subfolder named by the plan, so that part files of another plan are never used.

    Args:
        prefix: prefix of the output.
        plan: plan of this preparation.
        restart: discard earlier work; for one node only.
        node_status: status files of the nodes at work; None for one node.
    """

    def __init__(
        self, prefix: Path, plan: Plan, restart: bool = False, node_status: NodeStatusFiles | None = None
    ) -> None:
        self.folder = folder_of(prefix)
        self.parts = self.folder / f"parts-{plan.digest}"
        self.node_status = node_status or NodeStatusFiles(self.folder)
        self._plan = plan
        self._restart = restart

    @property
    def is_begun(self) -> bool:
        """True if a plan exists, whether this plan or another."""
        return (self.folder / _PLAN).exists()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create or check the folder, and lock out other preparations of this output.

        Raises:
            DataError: another preparation is at work, or the folder belongs to another plan.
            OSError: the folder cannot be created.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        node, is_alone = self.node_status.node, self.node_status.nodes == 1
        own = self.folder / f"node-{node}.lock"

        def same() -> str:
            holders = holders_of(sorted(self.folder.glob("node-*.lock")))
            return f"{self.folder}: the same output is being prepared by {holders}; wait for the end, or end it"

        def ours() -> str:
            return f"{self.folder}: {holders_of([own])} is already node {node}; give each node a different --node"

        with ExitStack() as locks:
            locks.enter_context(_lock(self.folder / "lock", not is_alone, same))
            name_holder(locks.enter_context(_lock(own, False, ours)).fileno())
            if is_alone:
                # Of nodes that were killed: they would be named as holders.
                for path in self.folder.glob("node-*.lock"):
                    if path != own:
                        path.unlink()
                self._tidy()
            elif node == 0:
                # Only old ones: other nodes are writing partial files of this attempt.
                remove_older(self.folder, "**/*.partial", LEFT_OVER_SECONDS)
            refusal = self._refusal_of(self._read() or self._write(self._plan.as_plain()))
            if refusal is not None:
                self.node_status.fail(refusal)
                raise DataError(refusal)
            self.parts.mkdir(exist_ok=True)
            self.node_status.forget()
            yield

    def refusal(self) -> str | None:
        """Return the reason against resuming the unfinished work; None if it can be resumed.

        Does not take the lock.
        """
        if self._restart or not self._has_part_files:
            return None
        found = self._read()
        return None if found is None else self._refusal_of(found)

    def _refusal_of(self, found: dict[str, Any]) -> str | None:
        plan = self._plan.as_plain()
        if found == plan:
            return None
        remedy = "start over with --restart" if self.node_status.nodes == 1 else f"remove {self.folder} to start over"
        return (
            f"{self.folder}: holds work that was begun with {_difference(found, plan)}; resume with the same input and "
            f"options, or {remedy}"
        )

    @property
    def _has_part_files(self) -> bool:
        return any(self.folder.glob("parts-*/*.shard")) or any(map(merged_chunks, self.folder.glob("parts-*")))

    def _tidy(self) -> None:
        """Remove partial files after a kill, and work that cannot be resumed."""
        self._remove_partials()
        if self._restart or not self.is_begun or not self._has_part_files:
            self.discard()

    def discard(self) -> None:
        """Remove all work that cannot be resumed; only while no other node is working."""
        # The plan last: after a kill in between, the remaining work is still rejected for another plan.
        for path in self.folder.glob("parts-*"):
            forget(path)
            shutil.rmtree(path)
        (self.folder / _PLAN).unlink(missing_ok=True)

    def _remove_partials(self) -> None:
        for path in self.folder.rglob("*.partial"):
            path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self.folder / _PLAN).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            raise DataError(f"{self.folder / _PLAN}: is damaged; remove {self.folder} to start over") from None
        return found if isinstance(found, dict) else {}

    def _write(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Write the plan, and return the content of the plan file.

        Another node may have written the file first.
        """
        partial = self.folder / f"{_PLAN}.{os.uname().nodename}.{os.getpid()}.partial"
        try:
            with partial.open("w", encoding="utf-8") as file:
                json.dump(plan, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.folder / _PLAN)
        except BaseException:
            partial.unlink(missing_ok=True)
            self.leave()
            raise
        return self._read() or {}

    def done(self) -> set[int]:
        """Return the numbers of the chunks that have a part file or are merged."""
        with os.scandir(self.parts) as entries:
            found = {int(match[1]) for entry in entries if (match := _PART_FILE.fullmatch(entry.name))}
        # Read the state after the listing: part files are removed only after the state is written.
        return found | {*range(merged_chunks(self.parts))}

    def part_file(self, number: int) -> Path:
        """Return the path of a chunk's part file."""
        return part_file_path(self.parts, number)

    def leave(self) -> int:
        """End the work early; return the number of finished chunks.

        Removes a folder without finished chunks.
        """
        if self.node_status.nodes > 1:
            return len(self.done()) if self.parts.exists() else 0
        with suppress(OSError):
            self._remove_partials()
        kept = len(self.done()) if self.parts.exists() else 0
        if not kept:
            shutil.rmtree(self.folder, ignore_errors=True)
        return kept

    def remove(self) -> None:
        """Remove the folder after the work is finished."""
        # The plan last: it must outlive the part files, as in ``discard``.
        forget(self.parts)
        shutil.rmtree(self.parts, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def folder_of(prefix: Path) -> Path:
    """Return the folder of an unfinished preparation of ``prefix``.

    It is beside the output, on the same file system.
    """
    return prefix.with_name(prefix.name + ".preparing")


@contextmanager
def _lock(path: Path, shared: bool, refusal: Callable[[], str]) -> Iterator[BinaryIO]:
    """Lock a file, whose content stays; yields the open file."""
    with path.open("ab") as file:
        try:
            import fcntl
        except ModuleNotFoundError:  # not POSIX
            yield file
            return
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(refusal()) from None
        except OSError:
            pass  # a file system without locks, such as Lustre mounted without flock
        yield file


def _difference(found: dict[str, Any], plan: dict[str, Any]) -> str:
    if found.get("tokenizer_sha256") != plan["tokenizer_sha256"]:
        return f"a different tokenizer (sha256 {str(found.get('tokenizer_sha256'))[:12]})"
    mine, theirs = plan["inputs"], found.get("inputs")
    if mine != theirs and isinstance(theirs, list):
        return _changed_inputs(theirs, mine)
    names = {"eod": "--append-eod", "text_document": "--text-document", "recipe": "--json-keys or --split-sentences"}
    key = next((key for key in plan if found.get(key) != plan[key]), "schema")
    return f"a different {names.get(key, key)}: {json.dumps(found.get(key))}"


def _changed_inputs(before: Sequence[Any], now: Sequence[Any]) -> str:
    if [path for path, *_ in before] != [path for path, *_ in now]:
        return f"different input files ({len(before):,} of them, the first {before[0][0] if before else 'missing'})"
    path = next(old[0] for old, new in zip(before, now, strict=True) if old != new)
    return f"{path} before its last modification"
