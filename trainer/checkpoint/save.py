"""Writing a checkpoint.

Every rank writes its own elements, and rank 0 the metadata and the final name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from trainer.checkpoint.checksums import VerifiedFile, WrittenFile, sampled_blocks
from trainer.checkpoint.directory import (
    METADATA,
    CheckpointError,
    DamagedCheckpointError,
    checkpoint_path,
    complete_iterations,
    damage,
    holds_checkpoints,
    prune,
    publish,
    remove_leftovers,
    temporary_path,
)
from trainer.checkpoint.metadata import CheckpointMetadata
from trainer.checkpoint.mounted_folder import MountedFolder
from trainer.checkpoint.rank_indexes import gather_indexes, index_path
from trainer.checkpoint.saved_progress import write_saved_progress
from trainer.checkpoint.saving.host_copy import HostCopy
from trainer.checkpoint.saving.staging import StagedSave, stage
from trainer.checkpoint.shards import write_rank_file
from trainer.distributed.collectives import first_text, max_over_ranks, sum_over_ranks
from trainer.process.failure import PeerFailedError
from trainer.process.run_directory import sync_directory

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel
    from trainer.process.progress import TrainingProgress
    from trainer.process.run_lock import RunLock


class MissedSave(NamedTuple):
    """A checkpoint that the disk did not take: it is full, its quota is used up, or its mount is gone.

    Attributes:
        what: what failed.
        sentence: what failed, where and why; equal on all ranks.
        is_here: True on each rank that met the failure.
    """

    what: str
    sentence: str
    is_here: bool

    def error(self) -> Exception:
        """The error with which this rank ends, if the run shall end."""
        if self.is_here:
            return CheckpointError(self.sentence)
        return PeerFailedError(f"{self.what}: another rank reports the cause")


class Drained(NamedTuple):
    """The end of a save: equal on all ranks but for ``drain_s``.

    Attributes:
        missed: the failure of the disk; None: the checkpoint is complete.
        written_bytes: size of all rank files; 0 if it was missed.
        stage_s: time for which the training of the slowest rank waited for its copies; 0 without.
        drain_s: time from the first collective to the end, on this rank.
    """

    missed: MissedSave | None
    written_bytes: int
    stage_s: float
    drain_s: float


@dataclass(frozen=True)
class CheckpointWriter:
    """Saves one run's checkpoints under ``root``, a folder that all ranks share.

    Attributes:
        attempt: number of the run's attempt; marks temporary folders if there is no fencing token.
        device: device of the small tensors of collectives.
        group: all ranks, for the collectives of ``prepare`` and ``drain``; None: the default group, which a thread
            beside the training cannot use.
        kernels: operation -> label of its backend, for the metadata.
        record: file that records each complete checkpoint; None: no file.
        fencing_token: of the run's lock, on all ranks; 0 without.
        lock: of the run, on rank 0; None elsewhere, and for a run without a directory.
    """

    root: Path
    config: TrainConfig
    vocab_size: int
    attempt: int
    device: torch.device
    kernels: Mapping[str, str] = field(default_factory=dict)
    record: Path | None = None
    fencing_token: int = 0
    lock: RunLock | None = None
    group: dist.ProcessGroup | None = None
    _mount: MountedFolder = field(default_factory=MountedFolder)

    def beside_training(self) -> CheckpointWriter:
        """The same writer with a process group of its own, which leaves the GPU alone, for drains in a thread.

        Collective: all ranks of the default group.
        """
        timeout = timedelta(minutes=self.config.parallel.distributed_timeout_minutes)
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc="save")
        return replace(self, device=torch.device("cpu"), group=group)

    def prepare(self, rank: int, *, has_saved: bool = False) -> None:
        """Make the folder and remove leftovers of dead attempts.

        Collective: all ranks, before the first save. A run that ``has_saved`` checkpoints gets no new folder: it would
        lie on the disk below a mount that is gone.

        Raises:
            CheckpointError: the folder cannot be written to, or has lost its checkpoints.
            LostLockError: on rank 0, another process has taken the run over.
        """

        def make() -> None:
            self._check_lock()
            if not has_saved:
                self.root.mkdir(parents=True, exist_ok=True)
            elif not holds_checkpoints(self.root):
                raise CheckpointError("its checkpoints are gone; was it unmounted?")
            self._mount.remember(self.root)
            remove_leftovers(self.root)
            # Fail now rather than after hours of training.
            probe = self.root / f".iter_0000000.tmp-{self._mark}"
            probe.mkdir()
            probe.rmdir()

        missed = self._together(make if rank == 0 else None, "checkpoints cannot be written")
        if missed is not None:
            raise missed.error()

    def save(
        self,
        model: ParallelModel,
        optimizer: MixedPrecisionOptimizer,
        progress: TrainingProgress,
        *,
        deletes_old: bool = True,
    ) -> MissedSave | None:
        """Write one checkpoint and read back a part; None, or the failure of the disk. Collective: all ranks.

        Raises: see drain.
        """
        return self.drain(self.stage(model, optimizer, progress), deletes_old=deletes_old).missed

    def stage(
        self,
        model: ParallelModel,
        optimizer: MixedPrecisionOptimizer,
        progress: TrainingProgress,
        memory: HostCopy | None = None,
    ) -> StagedSave:
        """Collect this rank's part of a checkpoint, between two steps. Collective: all ranks.

        With ``memory`` it is copied there, by ``drain`` in a thread or at the latest before the optimizer changes it,
        and the next steps may run while it is drained.
        """
        began = time.perf_counter()
        staged = stage(model, optimizer, self.config, progress)
        if memory is None:
            return staged
        return memory.take(staged).guarded_by(optimizer, began)

    def drain(self, staged: StagedSave, *, deletes_old: bool = True) -> Drained:
        """Write what was staged, read back a part, and publish it. Collective: all ranks.

        A failure leaves complete checkpoints as they are. With ``deletes_old`` rank 0 then deletes old ones by
        checkpoint.keep_last.

        Raises:
            CheckpointError: the parts of all ranks are not the whole model.
            LostLockError: on rank 0, another process has taken the run over; nothing is published.
            PeerFailedError: another rank failed, not for its disk.
        """
        iteration, mesh = staged.iteration, staged.mesh
        temporary = temporary_path(self.root, iteration, self._mark)
        what = f"the checkpoint of iteration {iteration} could not be written"
        is_first, written, stage_s = mesh.rank == 0, [0.0] * mesh.world_size, [0.0] * mesh.world_size
        began, total = time.perf_counter(), 0

        def write() -> None:
            written[mesh.rank] = float(self._write_part(temporary, staged))

        def finish(writers: Sequence[int]) -> None:
            self._describe(temporary, writers, staged)
            problem = damage(temporary)
            if problem is not None:
                raise DamagedCheckpointError(f"what was read back of {temporary} {problem}")
            publish(temporary, self.root, iteration, self._mark, self._check_lock)
            self._mount.remember(self.root)
            self.note_saved(iteration)

        try:
            missed = self._together(partial(self._begin, staged, temporary), what) or self._together(write, what)
            if missed is None:
                stage_s[mesh.rank] = staged.waited_s
                sums = sum_over_ranks([*written, *stage_s], self.device, self.group)
                written, stage_s = sums[: mesh.world_size], sums[mesh.world_size :]
                writers, total = [rank for rank, size in enumerate(written) if size], int(sum(written))
                missed = self._together(partial(finish, writers) if is_first else None, what)
        except Exception:
            if is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if is_first and missed is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        elif is_first and deletes_old:
            self._prune(iteration)
        return Drained(missed, 0 if missed is not None else total, max(stage_s), time.perf_counter() - began)

    @property
    def _mark(self) -> int:
        # Not the attempt if there is a lock: two attempts of one number must not share a temporary folder, or the one
        # that lost the run could publish what the other is writing.
        return self.fencing_token or self.attempt

    def note_saved(self, iteration: int | None) -> None:
        """Record the newest complete checkpoint, on rank 0; None: the run has none yet."""
        is_lost = self.lock is not None and self.lock.is_lost()
        if self.record is not None and not is_lost:
            write_saved_progress(self.record, iteration, self.root, self.attempt)

    def _check_lock(self) -> None:
        if self.lock is not None:
            self.lock.check()

    def _prune(self, iteration: int) -> None:
        """Delete checkpoints beyond checkpoint.keep_last; only log a failure, since the new checkpoint is complete."""
        keep_last = self.config.checkpoint.keep_last
        if keep_last is None or (self.lock is not None and self.lock.is_lost()):
            return
        try:
            prune(self.root, keep_last, iteration, self._mark)
        except OSError as error:
            print(f"old checkpoints in {self.root} could not be deleted: {error.strerror or error}", flush=True)

    def _together(self, action: Callable[[], None] | None, what: str) -> MissedSave | None:
        """Run ``action``, if any; the failure of the disk on any rank, or None. Collective: all ranks.

        Raises:
            Exception: of this rank's action, unless it is a failure of the disk.
            PeerFailedError: another rank has such an error.
        """
        problem: Exception | None = None
        try:
            if action is not None:
                action()
        except Exception as error:
            # Every kind of error: a rank that leaves silently keeps the others waiting until their timeout.
            problem = error
        is_disk = isinstance(problem, (OSError, DamagedCheckpointError))
        worst = max_over_ranks([0.0 if problem is None else 1.0 if is_disk else 2.0], self.device, self.group)[0]
        if worst == 0.0:
            return None
        if worst == 1.0:
            sentence = f"{what} to {self.root}: {self._reason(problem)}" if problem is not None else ""
            return MissedSave(what, first_text(sentence, self.device, self.group), is_here=problem is not None)
        if isinstance(problem, CheckpointError):
            raise CheckpointError(f"{what} to {self.root}: {self._reason(problem)}") from problem
        if problem is not None and not is_disk:
            raise problem
        raise PeerFailedError(f"{what}: another rank reports the cause")

    def _reason(self, problem: Exception) -> str:
        kept = complete_iterations_quietly(self.root)
        last = f"; the last complete one is {checkpoint_path(self.root, kept[-1]).name}" if kept else ""
        return (problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)) + last

    def _read_back(self, path: Path, written: WrittenFile, iteration: int) -> None:
        """Compare a file that this rank has just written with its checksums, by checkpoint.verify_after_save.

        Raises:
            DamagedCheckpointError: the disk returns other bytes.
            OSError: the disk cannot read them.
        """
        amount = self.config.checkpoint.verify_after_save
        if amount == "off":
            return
        count = len(written.checksums)
        with closing(VerifiedFile(path, written.checksums)) as file:
            problem = file.find_damage_on_disk(range(count) if amount == "all" else sampled_blocks(count, iteration))
        if problem is not None:
            raise DamagedCheckpointError(f"{path.name}, read back after the write, {problem}")

    def _begin(self, staged: StagedSave, temporary: Path) -> None:
        """Make the copies, and on rank 0 the folder."""
        staged.copy()
        if staged.mesh.rank != 0:
            return
        self._check_lock()
        shutil.rmtree(temporary, ignore_errors=True)
        self._mount.check(self.root)
        # Without parents: a mount that is gone must not be replaced by a folder on the disk below it.
        temporary.mkdir()

    def _write_part(self, temporary: Path, staged: StagedSave) -> int:
        """Write this rank's tensors; returns the bytes of its files, 0 if it has no tensors."""
        files: dict[str, WrittenFile] = {}
        if staged.files:
            files = {file: write_rank_file(temporary / file, tensors) for file, tensors in staged.files.items()}
            for file, written in files.items():
                self._read_back(temporary / file, written, staged.iteration)
            text = json.dumps({"tensors": staged.index, "files": files})
            index_path(temporary, staged.mesh.rank).write_text(text, encoding="utf-8")
        return sum(written.size for written in files.values())

    def _describe(self, temporary: Path, writers: Sequence[int], staged: StagedSave) -> None:
        tensors, files, checksums = gather_indexes(temporary, writers)
        metadata = CheckpointMetadata(
            progress=staged.progress,
            config=self.config.model_dump(mode="json"),
            vocab_size=self.vocab_size,
            layout=staged.layout,
            optimizer=staged.optimizer,
            loss_scaler=staged.loss_scaler,
            tensors=tensors,
            files=files,
            kernels=self.kernels,
            checksums=checksums,
            fencing_token=self.lock.token if self.lock is not None else None,
        )
        # Last: a folder with this file has all others.
        with (temporary / METADATA).open("w", encoding="utf-8") as file:
            json.dump(metadata.as_json(), file)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(temporary)


def complete_iterations_quietly(root: Path) -> list[int]:
    """Like complete_iterations, but an unreadable folder has none: for messages about another error."""
    with contextlib.suppress(OSError):
        return complete_iterations(root)
    return []
