"""Writing a checkpoint: every rank its own part, rank 0 the whole's description and name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.agreement import any_rank
from trainer.checkpoint.directory import (
    METADATA,
    CheckpointError,
    checkpoint_path,
    complete_iterations,
    prune,
    publish,
    remove_leftovers,
    temporary_path,
)
from trainer.checkpoint.metadata import CheckpointMetadata, Shard, StoredTensor
from trainer.checkpoint.shards import DTYPE_NAMES, write_shard_file
from trainer.failure import PeerFailedError
from trainer.run_directory import sync_directory

if TYPE_CHECKING:
    from trainer.config import TrainConfig
    from trainer.mesh import ParallelMesh
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parameters import ParameterLayout
    from trainer.progress import TrainingProgress
    from trainer.train_state import ParallelModel


@dataclass(frozen=True)
class CheckpointWriter:
    """Saves one run's checkpoints under ``root``, a folder that all ranks share.

    Attributes:
        attempt: number of the run's attempt; marks what is half-written.
        device: where small tensors for agreement go.
    """

    root: Path
    config: TrainConfig
    vocab_size: int
    attempt: int
    device: torch.device

    def prepare(self, rank: int) -> None:
        """Make the folder and clear it of what dead attempts left. Collective: all ranks, before the first save.

        Raises:
            CheckpointError: the folder cannot be written to.
        """

        def make() -> None:
            self.root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.root)
            # Better now than after hours of training.
            probe = self.root / f".iter_0000000.tmp-{self.attempt}"
            probe.mkdir()
            probe.rmdir()

        self._together(make if rank == 0 else None, "checkpoints cannot be written")

    def save(self, model: ParallelModel, optimizer: MixedPrecisionOptimizer, progress: TrainingProgress) -> None:
        """Write one checkpoint, then delete those beyond checkpoint.keep_last. Collective: all ranks.

        Only the first replica's ranks write. Whatever fails, complete checkpoints stay as they are.

        Raises:
            CheckpointError: this rank could not write its part.
            PeerFailedError: another one could not.
        """
        iteration, mesh = progress.iteration, model.mesh
        temporary = temporary_path(self.root, iteration, self.attempt)
        what = f"the checkpoint of iteration {iteration} could not be written"
        is_first = mesh.rank == 0

        def begin() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

        def finish() -> None:
            self._describe(temporary, model, optimizer, progress)
            publish(temporary, self.root, iteration, self.attempt)
            if self.config.checkpoint.keep_last is not None:
                prune(self.root, self.config.checkpoint.keep_last, iteration, self.attempt)

        try:
            self._together(begin if is_first else None, what)
            self._together((lambda: self._write_part(temporary, model, optimizer)) if mesh.dp_rank == 0 else None, what)
            self._together(finish if is_first else None, what)
        except (CheckpointError, PeerFailedError):
            if is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _together(self, action: Callable[[], None] | None, what: str) -> None:
        """Run ``action`` where there is one; every rank leaves with an error if it failed on any."""
        problem: OSError | None = None
        try:
            if action is not None:
                action()
        except OSError as error:
            problem = error
        anywhere = any_rank(problem is not None, self.device)
        if problem is not None:
            kept = complete_iterations_quietly(self.root)
            last = f"; the last complete one is {checkpoint_path(self.root, kept[-1]).name}" if kept else ""
            raise CheckpointError(f"{what} to {self.root}: {problem.strerror or problem}{last}") from problem
        if anywhere:
            raise PeerFailedError(f"{what}: another rank says why")

    def _write_part(self, temporary: Path, model: ParallelModel, optimizer: MixedPrecisionOptimizer) -> None:
        part = f"pp{model.mesh.pp_rank:02d}_tp{model.mesh.tp_rank:02d}"
        owned = [layout for layout in model.layouts.values() if is_written(layout, model.mesh)]
        kinds: dict[str, dict[str, Tensor]] = {"model": {name: p.detach() for name, p in model.parameters.items()}}
        if not self.config.checkpoint.no_save_optim:
            kinds |= {
                kind: {name: tensor.view(model.parameters[name].shape) for name, tensor in tensors.items()}
                for kind, tensors in optimizer.tensors().items()
            }
        contents: dict[str, dict[str, Tensor]] = {}
        index: dict[str, dict[str, Any]] = {}
        for kind, tensors in kinds.items():
            file = f"{'model' if kind == 'model' else 'optimizer'}_{part}.safetensors"
            for layout in owned:
                if layout.name not in tensors:
                    continue
                stored, shard = _describe_part(layout, model.mesh, file, tensors[layout.name].dtype)
                if shard.stop > shard.start:
                    key = layout.name if kind == "model" else f"{kind}.{layout.name}"
                    # Padded rows are the layout's, not the model's: each reader adds its own.
                    contents.setdefault(file, {})[key] = tensors[layout.name][: _valid_rows(layout, model.mesh)]
                    stored = dataclasses.replace(stored, shards=(shard,))
                index.setdefault(kind, {})[layout.name] = dataclasses.asdict(stored)
        files = {file: write_shard_file(temporary / file, tensors) for file, tensors in contents.items()}
        (temporary / f"index_{part}.json").write_text(json.dumps({"tensors": index, "files": files}), encoding="utf-8")

    def _describe(
        self,
        temporary: Path,
        model: ParallelModel,
        optimizer: MixedPrecisionOptimizer,
        progress: TrainingProgress,
    ) -> None:
        tensors: dict[str, dict[str, StoredTensor]] = {}
        files: dict[str, int] = {}
        for part in sorted(temporary.glob("index_*.json")):
            index = json.loads(part.read_text(encoding="utf-8"))
            files |= index["files"]
            for kind, named in index["tensors"].items():
                for name, values in named.items():
                    _merge(tensors.setdefault(kind, {}), name, values)
            part.unlink()
        with_optimizer = not self.config.checkpoint.no_save_optim
        mesh = model.mesh
        metadata = CheckpointMetadata(
            progress=progress.state(),
            config=self.config.model_dump(mode="json"),
            vocab_size=self.vocab_size,
            layout={"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp},
            optimizer={"name": self.config.optimizer.optimizer, "steps": optimizer.steps} if with_optimizer else None,
            loss_scaler=optimizer.loss_scaler.state() if with_optimizer else None,
            tensors=tensors,
            files=files,
        )
        with (temporary / METADATA).open("w", encoding="utf-8") as file:
            json.dump(metadata.as_json(), file)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(temporary)


def is_written(layout: ParameterLayout, mesh: ParallelMesh) -> bool:
    """Whether this rank stores its part of a parameter: every element of the model is stored once."""
    if mesh.dp_rank != 0 or (layout.tied_over_stages and not mesh.is_first_stage):
        return False
    return layout.tp_dim is not None or mesh.tp_rank == 0


def stored_shape(layout: ParameterLayout) -> tuple[int, ...]:
    """Shape of the global tensor without vocabulary padding."""
    return (layout.valid_rows or layout.global_shape[0], *layout.global_shape[1:])


def local_range(layout: ParameterLayout, mesh: ParallelMesh) -> tuple[int, int]:
    """Entries of the divided dim that this rank holds, clipped to those that mean something."""
    dim = layout.tp_dim if layout.tp_dim is not None else 0
    size = layout.global_shape[dim]
    start, stop = 0, size
    if layout.tp_dim is not None:
        start, stop = size // mesh.tp * mesh.tp_rank, size // mesh.tp * (mesh.tp_rank + 1)
    end = stored_shape(layout)[dim]
    return min(start, end), min(stop, end)


def _valid_rows(layout: ParameterLayout, mesh: ParallelMesh) -> int | None:
    if layout.valid_rows is None:
        return None
    start, stop = local_range(layout, mesh)
    return stop - start


def _describe_part(
    layout: ParameterLayout, mesh: ParallelMesh, file: str, dtype: torch.dtype
) -> tuple[StoredTensor, Shard]:
    start, stop = local_range(layout, mesh)
    return StoredTensor(stored_shape(layout), DTYPE_NAMES[dtype], layout.tp_dim, ()), Shard(file, start, stop)


def _merge(named: dict[str, StoredTensor], name: str, values: dict[str, Any]) -> None:
    shards = tuple(Shard(**shard) for shard in values["shards"])
    known = named.get(name)
    if known is None:
        named[name] = StoredTensor(tuple(values["shape"]), values["dtype"], values["dim"], shards)
    else:
        both = sorted((*known.shards, *shards), key=lambda shard: shard.start)
        named[name] = dataclasses.replace(known, shards=tuple(both))


def complete_iterations_quietly(root: Path) -> list[int]:
    """As complete_iterations, but an unreadable folder holds none: for messages about another error."""
    with contextlib.suppress(OSError):
        return complete_iterations(root)
    return []
