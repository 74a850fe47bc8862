"""The folder of an unfinished preparation: what it is of, which chunks are done, and who may go on with it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.data.errors import DataError
from trainer.data.indexed.cache_entry import LEFT_OVER_SECONDS, remove_older
from trainer.data.prepare.chunk_work import shard_path
from trainer.data.prepare.chunks import TextDocument
from trainer.data.prepare.encoding import Recipe
from trainer.data.prepare.inputs import InputFile
from trainer.data.prepare.merge import forget, joined_chunks
from trainer.data.prepare.node_status import NodeMarks

_PLAN = "plan.json"
_SHARD = re.compile(r"(\d{8,})\.shard")


@dataclass(frozen=True)
class Plan:
    """All that decides the bytes of the output. A preparation goes on only with the plan that it began with.

    Attributes:
        tokenizer_sha256: fingerprint.
        vocab_size: of the tokenizer.
        eod: token that ends documents; None: none is appended.
        recipe: what is made of a document.
        text_document: what is a document in plain text.
        chunk_bytes: how the inputs are cut.
        inputs: the files.
    """

    tokenizer_sha256: str
    vocab_size: int
    eod: int | None
    recipe: Recipe
    text_document: TextDocument
    chunk_bytes: int
    inputs: tuple[InputFile, ...]

    def as_plain(self) -> dict[str, Any]:
        """As it is written down."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {"schema": 1, **plain, "inputs": [[file.path, file.size, file.mtime_ns] for file in self.inputs]}

    @property
    def digest(self) -> str:
        """What tells it from other plans."""
        return hashlib.sha256(json.dumps(self.as_plain(), sort_keys=True).encode()).hexdigest()[:16]


class Journal:
    """The folder ``<prefix>.preparing``. Made when it is entered; stays after an error, that the work can go on.

    Shards lie in a folder of it that is named by the plan, so that those of another plan are never taken for ours.

    Args:
        prefix: of the output.
        plan: of this preparation.
        restart: throw away what an earlier one has done; for one node.
        marks: of the nodes that work in it; None: we are alone.
    """

    def __init__(self, prefix: Path, plan: Plan, restart: bool = False, marks: NodeMarks | None = None) -> None:
        self.folder = folder_of(prefix)
        self.parts = self.folder / f"parts-{plan.digest}"
        self.marks = marks or NodeMarks(self.folder)
        self._plan = plan
        self._restart = restart

    @property
    def is_begun(self) -> bool:
        """Whether there is a plan, ours or another one."""
        return (self.folder / _PLAN).exists()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make or check the folder, and keep other preparations of the same output out while this one works.

        Raises:
            DataError: another one is at work, or what was begun there is of another plan.
            OSError: the folder cannot be made.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        node, is_alone = self.marks.node, self.marks.nodes == 1
        same = f"{self.folder}: another process is preparing the same output"
        ours = f"{self.folder}: another process is already node {node}; give each node a --node of its own"
        with ExitStack() as locks:
            locks.enter_context(_lock(self.folder / "lock", not is_alone, f"{same}; wait for it, or end it"))
            locks.enter_context(_lock(self.folder / f"node-{node}.lock", False, ours))
            if is_alone:
                self._tidy()
            elif node == 0:
                # Those of this start are being written to.
                remove_older(self.folder, "**/*.partial", LEFT_OVER_SECONDS)
            refusal = self._refusal_of(self._read() or self._write(self._plan.as_plain()))
            if refusal is not None:
                self.marks.fail(refusal)
                raise DataError(refusal)
            self.parts.mkdir(exist_ok=True)
            self.marks.forget()
            yield

    def refusal(self) -> str | None:
        """Why what was begun here cannot be gone on with, as far as can be told without taking it; None: it can be."""
        if self._restart or not self._has_shards:
            return None
        found = self._read()
        return None if found is None else self._refusal_of(found)

    def _refusal_of(self, found: dict[str, Any]) -> str | None:
        plan = self._plan.as_plain()
        if found == plan:
            return None
        anew = "begin anew with --restart" if self.marks.nodes == 1 else f"remove {self.folder} to begin anew"
        return (
            f"{self.folder}: holds what was begun with {_difference(found, plan)}; go on with the same input and "
            f"options, or {anew}"
        )

    @property
    def _has_shards(self) -> bool:
        return any(self.folder.glob("parts-*/*.shard")) or any(map(joined_chunks, self.folder.glob("parts-*")))

    def _tidy(self) -> None:
        """Remove what a kill left half written, and what nobody will go on with."""
        self._remove_partials()
        if self._restart or not self.is_begun or not self._has_shards:
            self.discard()

    def discard(self) -> None:
        """Remove what is done, as going on with it leads nowhere; while no other node is at work."""
        # The plan last: what is left by a kill in between is still refused to another one.
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
            raise DataError(f"{self.folder / _PLAN}: is damaged; remove {self.folder} to begin anew") from None
        return found if isinstance(found, dict) else {}

    def _write(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Write the plan, and give what stands there then: another node may have been first."""
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
        """Numbers of the chunks that have a shard, or are joined already."""
        with os.scandir(self.parts) as entries:
            found = {int(match[1]) for entry in entries if (match := _SHARD.fullmatch(entry.name))}
        # Then alone: shards go when this is known.
        return found | {*range(joined_chunks(self.parts))}

    def shard(self, number: int) -> Path:
        """Where the shard of a chunk lies."""
        return shard_path(self.parts, number)

    def leave(self) -> int:
        """The work ends before it is done; gives how many chunks are kept. A folder without any goes."""
        if self.marks.nodes > 1:
            return len(self.done()) if self.parts.exists() else 0
        with suppress(OSError):
            self._remove_partials()
        kept = len(self.done()) if self.parts.exists() else 0
        if not kept:
            shutil.rmtree(self.folder, ignore_errors=True)
        return kept

    def remove(self) -> None:
        """All is done."""
        # The plan last, for the same reason as above.
        forget(self.parts)
        shutil.rmtree(self.parts, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def folder_of(prefix: Path) -> Path:
    """Where an unfinished preparation of ``prefix`` lies: beside the output, to be on the same file system."""
    return prefix.with_name(prefix.name + ".preparing")


@contextmanager
def _lock(path: Path, shared: bool, refusal: str) -> Iterator[None]:
    try:
        import fcntl
    except ModuleNotFoundError:  # not POSIX
        yield
        return
    with path.open("wb") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(refusal) from None
        except OSError:
            pass  # a file system without locks, as Lustre mounted without flock
        yield


def _difference(found: dict[str, Any], plan: dict[str, Any]) -> str:
    if found.get("tokenizer_sha256") != plan["tokenizer_sha256"]:
        return f"another tokenizer (sha256 {str(found.get('tokenizer_sha256'))[:12]})"
    mine, theirs = plan["inputs"], found.get("inputs")
    if mine != theirs and isinstance(theirs, list):
        return _changed_inputs(theirs, mine)
    names = {"eod": "--append-eod", "text_document": "--text-document", "recipe": "--json-keys or --split-sentences"}
    key = next((key for key in plan if found.get(key) != plan[key]), "schema")
    return f"another {names.get(key, key)}: {json.dumps(found.get(key))}"


def _changed_inputs(before: Sequence[Any], now: Sequence[Any]) -> str:
    if [path for path, *_ in before] != [path for path, *_ in now]:
        return f"other input files ({len(before):,} of them, the first {before[0][0] if before else 'missing'})"
    path = next(one[0] for one, other in zip(before, now, strict=True) if one != other)
    return f"{path} as it was before it was written to"
