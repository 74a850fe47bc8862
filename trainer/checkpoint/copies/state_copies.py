"""One rank's copies of its state: in its node's folder, and in that of a neighbour."""

from __future__ import annotations

import errno
import json
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.checksums import ChecksumWriter, WrittenFile
from trainer.checkpoint.copies.folder import CopyFolder, CopyName, is_in_memory, remove_abandoned
from trainer.checkpoint.copies.messages import exchange_chunks, gather_texts
from trainer.checkpoint.copies.state import digest, stage_state
from trainer.checkpoint.saving.host_copy import HostCopy, copied_bytes
from trainer.checkpoint.saving.memory_check import CopyUse, check_copies_fit
from trainer.distributed.collectives import first_text, from_first_rank, max_over_ranks, sum_over_ranks

if TYPE_CHECKING:
    from trainer.checkpoint.saving.staging import StagedSave
    from trainer.config.train_config import TrainConfig
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel
    from trainer.process.launch_environment import LaunchEnvironment
    from trainer.process.progress import TrainingProgress

CPU = torch.device("cpu")
_SETS = 2
"""Copies of a state that a folder holds at the same time: the newest complete one, and the one that is written."""
_USE = CopyUse("checkpoint.copy_interval", "copies of the state", "leave checkpoint.copy_interval out")


class Copied(NamedTuple):
    """The end of a copy: equal on all ranks but for ``drain_s``.

    Attributes:
        problem: the reason why there is none; empty: it is complete.
        size: bytes of the states of all ranks, without those on neighbours.
        stage_s: time for which the training waited, on the slowest rank.
        drain_s: time from the first byte to the end, on this rank.
    """

    problem: str
    size: int
    stage_s: float
    drain_s: float


@dataclass
class StateCopies:
    """One rank's copies. All methods are collective, unless they say otherwise.

    Attributes:
        parent: checkpoint.copy_folder.
        folder: of the run in it, on this node; None: it cannot be used here.
        problem: the reason why copies are not made, equal on all ranks; empty: they are.
        neighbours: ranks to which this rank sends its state, and whose state it takes; None on one node.
        run: marks the copies of one run.
        submission: number of the job that makes them.
        attempt: of the run.
        digest: of this rank's layout and config.
        group: of gloo, with all ranks.
    """

    parent: Path
    folder: CopyFolder | None
    problem: str
    neighbours: tuple[int, int] | None
    run: str
    submission: int
    attempt: int
    digest: str
    group: dist.ProcessGroup | None
    memory: HostCopy = field(repr=False)

    @classmethod
    def open(
        cls,
        config: TrainConfig,
        vocab_size: int,
        launch: LaunchEnvironment,
        run: Path,
        numbers: tuple[int, int],
        model: ParallelModel,
        optimizer: MixedPrecisionOptimizer,
        device: torch.device,
    ) -> StateCopies:
        """Open the folder on each node, and agree that all ranks can use theirs.

        Args:
            config: with checkpoint.copy_folder.
            vocab_size: of the data.
            launch: tells the ranks of a node.
            run: directory of the run.
            numbers: of the submission, as rank 0 knows it, and of the attempt.
            model: of the rank.
            optimizer: of the rank.
            device: of the state.
        """
        assert config.checkpoint.copy_folder is not None
        parent, submission = Path(config.checkpoint.copy_folder), from_first_rank(numbers[:1], device)[0]
        timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc="copies")
        folder, problem = None, ""
        try:
            folder = CopyFolder.open(parent, run.name)
            if launch.local_rank == 0:
                remove_abandoned(parent, folder.path)
        except OSError as error:
            problem = _sentence(parent, error)
        # Nodes with unequally many ranks have no neighbours: see _neighbours.
        sizes = max_over_ranks([float(launch.local_world_size), -float(launch.local_world_size)], CPU, group)
        per_node = launch.local_world_size if sizes[0] == -sizes[1] else launch.world_size
        mark = digest(config, vocab_size, model, optimizer)
        return cls(
            parent,
            folder,
            first_text(problem, CPU, group),
            _neighbours(launch.rank, per_node, launch.world_size),
            str(run),
            submission,
            numbers[1],
            mark,
            group,
            HostCopy(device),
        )

    def reserve(self, staged: StagedSave, free: int, is_first_of_node: bool) -> int:
        """Take the host memory for ``staged``; the bytes of memory that copies take on this rank's node.

        Raises:
            ConfigError: a node has too little, with what the folder takes if its files are in memory; on all ranks.
        """
        own = copied_bytes(staged)
        sizes = [0.0] * staged.mesh.world_size
        sizes[staged.mesh.rank] = float(own)
        sizes = sum_over_ranks(sizes, CPU, self.group)
        files = 0
        if self.folder is not None and is_in_memory(self.folder.path):
            others = int(sizes[self.neighbours[1]]) if self.neighbours is not None else 0
            files = _SETS * (own + others) - (self.folder.size if is_first_of_node else 0)
        memory = check_copies_fit(own + files, free, CPU, use=_USE)
        self.memory.reserve(own)
        return memory.of_node

    def stage(self, model: ParallelModel, optimizer: MixedPrecisionOptimizer, progress: TrainingProgress) -> StagedSave:
        """Copy this rank's state to host memory, by ``drain`` or before its next change. No ``drain`` runs."""
        began = time.perf_counter()
        return self.memory.take(stage_state(model, optimizer, progress)).guarded_by(optimizer, began)

    def drain(self, staged: StagedSave) -> Copied:
        """Write what was staged, here and at the neighbour; a folder that refuses it ends the copies of this attempt.

        Older copies are deleted once the new one is complete on all ranks.
        """
        began, rank, iteration, size = time.perf_counter(), staged.mesh.rank, staged.iteration, copied_bytes(staged)
        source = rank if self.neighbours is None else self.neighbours[1]
        staged.copy()
        own = _Part(self.folder, CopyName(rank, iteration, rank))
        other = _Part(self.folder, CopyName(source, iteration, rank))
        with own, other:
            self._write(own, other, self.memory.content(size))
            header = self._header(staged, own.close())
            theirs = self._exchange_header(header)
            own.publish(header)
            if self.neighbours is not None:
                other.expect(_written(theirs))
                other.publish(theirs)
        problem = own.problem or other.problem
        sentence = first_text(_sentence(self.parent, problem) if problem is not None else "", CPU, self.group)
        total = int(sum_over_ranks([float(size)], CPU, self.group)[0])
        stage_s = max_over_ranks([staged.waited_s], CPU, self.group)[0]
        if self.folder is not None:
            # All ranks have the new one: those that shared the folder no longer need the old ones.
            self.folder.remove(lambda name: name.iteration < iteration if sentence else name.iteration >= iteration)
        return Copied(sentence, 0 if sentence else total, stage_s, time.perf_counter() - began)

    def keep_only(self, iteration: int | None, attempt: int = 0) -> None:
        """Delete all copies but those of one state, from which the run goes on; None keeps none."""
        if self.folder is not None:
            kept = set()
            if iteration is not None:
                headers = self.folder.headers().items()
                kept = {name for name, header in headers if (name.iteration, header["attempt"]) == (iteration, attempt)}
            self.folder.remove(lambda name: name in kept)
        # Nobody may write before the slowest rank has looked.
        max_over_ranks([0.0], CPU, self.group)

    def discard(self) -> None:
        """Delete all copies of the run on this node, at its end. Not collective; no drain runs any more."""
        if self.folder is not None:
            self.folder.discard()

    def _write(self, own: _Part, other: _Part, content: Tensor) -> None:
        """Write this rank's state, send it to one neighbour, and write that of the other."""
        if self.neighbours is None:
            own.write(content)
            return
        target, source = self.neighbours
        sizes = [int(text) for text in gather_texts(str(content.numel()), self.group)]
        for outgoing, incoming in exchange_chunks(content, sizes[source], target, source, self.group):
            own.write(outgoing)
            other.write(incoming)

    def _exchange_header(self, header: dict[str, Any]) -> dict[str, Any]:
        """The header of the state that this rank keeps for its neighbour; empty on one node or after a failure."""
        if self.neighbours is None:
            return {}
        target, source = self.neighbours
        data = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        sizes = [int(text) for text in gather_texts(str(data.numel()), self.group)]
        found = [incoming for _, incoming in exchange_chunks(data, sizes[source], target, source, self.group)]
        values: dict[str, Any] = json.loads(torch.cat(found).numpy().tobytes())
        return values

    def _header(self, staged: StagedSave, written: WrittenFile | None) -> dict[str, Any]:
        """The header of this rank's state; empty if it was not written."""
        if written is None:
            return {}
        assert staged.optimizer is not None
        return {
            "run": self.run,
            "submission": self.submission,
            "attempt": self.attempt,
            "digest": self.digest,
            "progress": dict(staged.progress),
            "optimizer_steps": staged.optimizer["steps"],
            "loss_scaler": staged.loss_scaler,
            "size": written.size,
            "checksums": written.checksums,
        }


class _Part:
    """A file of a copy while it is written. After an OSError it takes nothing more, and has the ``problem``."""

    def __init__(self, folder: CopyFolder | None, name: CopyName) -> None:
        self.problem: OSError | None = None
        self._folder, self._name = folder, name
        self._writer: ChecksumWriter | None = None
        self._written: WrittenFile | None = None
        self._resources = ExitStack()

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def write(self, data: Tensor) -> None:
        """Append bytes, which stay as they are until ``close``."""
        if self.problem is not None or self._folder is None:
            return
        try:
            if self._writer is None:
                file = self._resources.enter_context(self._folder.create(self._name))
                self._writer = self._resources.enter_context(ChecksumWriter(file))
            if data.numel():
                self._writer.write(data.numpy().data)
        except OSError as error:
            self.problem = error

    def close(self) -> WrittenFile | None:
        """Write the rest; size and checksums, or None after a failure."""
        if self._written is None and self._writer is not None and self.problem is None:
            try:
                self._written = self._writer.close()
            except OSError as error:
                self.problem = error
        return self._written if self.problem is None else None

    def expect(self, sent: WrittenFile | None) -> None:
        """Compare what was written with what the other rank has ``sent``; None: it met a failure."""
        if self.close() != sent and sent is not None and self.problem is None:
            self.problem = OSError(errno.EIO, f"{self._name} has arrived with other bytes")

    def publish(self, header: dict[str, Any]) -> None:
        """Give the file its name; an empty ``header`` belongs to a state whose rank met a failure."""
        if self.problem is None and header and self._folder is not None:
            try:
                self._folder.publish(self._name, header)
            except OSError as error:
                self.problem = error


def _neighbours(rank: int, per_node: int, world_size: int) -> tuple[int, int] | None:
    """The ranks in the same place on the next node and on the one before; None if all ranks are on one node."""
    if per_node >= world_size or world_size % per_node:
        return None
    return (rank + per_node) % world_size, (rank - per_node) % world_size


def _written(header: dict[str, Any]) -> WrittenFile | None:
    return WrittenFile(header["size"], header["checksums"]) if header else None


def _sentence(parent: Path, error: OSError) -> str:
    return f"{parent} on {socket.gethostname()}: {error.strerror or error}"
