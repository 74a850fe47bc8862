"""The whole training state of one rank: what a restore of a checkpoint gives it back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.saving.staging import StagedSave
from trainer.optimizer.split_master import Master, joined

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel
    from trainer.process.progress import TrainingProgress

_SECTIONS = ("model", "parallel", "training", "optimizer", "data")
"""Sections of the config that decide about the bits of a step."""
_FILE = "state"


def stage_state(model: ParallelModel, optimizer: MixedPrecisionOptimizer, progress: TrainingProgress) -> StagedSave:
    """Collect this rank's state between two steps. The tensors are live views. Collective: all ranks."""
    model.gradients.wait_for_weights()
    return StagedSave(
        mesh=model.mesh,
        progress=progress.state(),
        layout={},
        optimizer={"steps": optimizer.steps},
        loss_scaler=optimizer.loss_scaler.state(),
        files={_FILE: state_tensors(model, optimizer)},
        index={},
    )


def state_tensors(model: ParallelModel, optimizer: MixedPrecisionOptimizer) -> dict[str, Master]:
    """Live masters, moments and buffers of this rank, 1-D, in an order that is equal in each attempt.

    16-bit weights are copies of their masters, and come back from these.
    """
    kinds = optimizer.tensors()
    masters = kinds.pop("master", {})
    found: dict[str, Master] = {}
    for shard in model.gradients.parameter_shards:
        found[f"master.{shard.name}"] = masters.get(shard.name, shard.weight).detach()
        for moment, named in sorted(kinds.items()):
            found[f"{moment}.{shard.name}"] = named[shard.name]
    return found | {f"model.{buffer.name}": buffer.weight for buffer in model.buffer_shards}


def put_back(
    staged: StagedSave,
    copied: StagedSave,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer,
    header: dict[str, Any],
) -> None:
    """Fill the live tensors of ``staged`` from those of ``copied``, and bring the state to the weights of all ranks.

    Collective: all ranks.

    Args:
        staged: of this rank, by ``stage_state``.
        copied: the same tensors, with the values.
        model: of the rank.
        optimizer: of the rank.
        header: of the copies, the same on all ranks.
    """
    for name, tensor in staged.files[_FILE].items():
        tensor.copy_(joined(copied.files[_FILE][name]))
    optimizer.restore(int(header["optimizer_steps"]), header["loss_scaler"])
    model.gradients.wait_for_weights()


def digest(config: TrainConfig, vocab_size: int, model: ParallelModel, optimizer: MixedPrecisionOptimizer) -> str:
    """A digest of all that must be equal where a copy of this rank's state is put back."""
    starts = {shard.name: shard.start for shard in model.stored_shards}
    tensors = [
        (name, str(tensor.dtype), tensor.numel(), starts[name.partition(".")[2]])
        for name, tensor in state_tensors(model, optimizer).items()
    ]
    sections = config.model_dump(mode="json", include=set(_SECTIONS))
    values = [sections, vocab_size, asdict(model.mesh), model.mesh.world_size, tensors]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
