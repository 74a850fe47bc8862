"""Global batches: this replica's micro-batches, and this rank's share of their labels and losses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from trainer.distributed.collectives import sum_over_ranks
from trainer.pipeline.executor import forward_only

if TYPE_CHECKING:
    from trainer.config.sections.batch_sizes import BatchSizes
    from trainer.config.train_config import TrainConfig
    from trainer.data.loading.loader import BatchLoader
    from trainer.data.samples.batches import Split
    from trainer.data.samples.micro_batch import MicroBatch
    from trainer.parallel_model import ParallelModel
    from trainer.process.progress import TrainingProgress


@dataclass(frozen=True)
class GlobalBatches:
    """The batches of one rank's training loop."""

    config: TrainConfig
    model: ParallelModel
    data: BatchLoader
    device: torch.device

    @cached_property
    def sizes(self) -> BatchSizes:
        """Numbers of samples of the training batches."""
        return self.config.batch_sizes(self.model.mesh.dp)

    def schedule_step(self, progress: TrainingProgress) -> float:
        """Place in the schedules of learning rate and weight decay: steps that updated the weights.

        With a ramp or steps it is their samples in full batches, as in Megatron-LM, whose scheduler counts samples
        (megatron/core/optimizer_param_scheduler.py).
        """
        if self.sizes.are_constant:
            return progress.optimizer_steps
        return self.sizes.full_batches(progress.consumed_samples - progress.skipped_samples)

    def read(self, split: Split, consumed_samples: int) -> tuple[list[MicroBatch], dict[str, float]]:
        """This replica's micro-batches, and this rank's share of the labels of each term of the loss."""
        mesh = self.model.mesh
        batches = self.data.micro_batches(split, consumed_samples)
        # All ranks of a replica read the same whole samples; the first of them contributes the count.
        speaks = mesh.tp_rank == mesh.cp_rank == mesh.pp_rank == 0
        counts: dict[str, float] = {}
        for batch in batches:
            for name, count in batch.loss_counts.items():
                counts[name] = counts.get(name, 0.0) + count * speaks
        return [batch.to(self.device) for batch in batches], counts

    def labels(self, own_counts: dict[str, float], samples: int) -> dict[str, int]:
        """Number of labels of each term of the loss in the whole batch of ``samples``. Collective: all ranks."""
        if not self.data.masks_loss:
            return dict.fromkeys(own_counts, samples * self.config.training.seq_length)
        totals = sum_over_ranks(list(own_counts.values()), self.device)
        return {name: int(count) for name, count in zip(own_counts, totals, strict=True)}

    def own_sums(self, loss: torch.Tensor, terms: int) -> torch.Tensor:
        """This rank's share of the sum of each term of the loss: float64 [terms] on the device."""
        # Every tp rank of the last stage has the same sums; the first of them contributes them.
        mesh = self.model.mesh
        if mesh.computes_loss and mesh.tp_rank == 0:
            return loss.view(-1).double()
        return torch.zeros(terms, dtype=torch.float64, device=self.device)

    def own_losses(self, loss: torch.Tensor, terms: int) -> list[float]:
        """``own_sums``, after a wait for the device."""
        return [float(total) for total in self.own_sums(loss, terms).tolist()]

    def evaluate(self, count: int) -> dict[str, float | None]:
        """Mean of each term of the loss over the first ``count`` batches of the valid split; None without labels.

        Collective: all ranks.
        """
        sums: dict[str, float] = {}
        counts: dict[str, float] = {}
        for number in range(count):
            micro_batches, own_counts = self.read("valid", number * self.sizes.full)
            losses = self.own_losses(forward_only(self.model, micro_batches), len(own_counts))
            for (name, labels), loss in zip(own_counts.items(), losses, strict=True):
                sums[name] = sums.get(name, 0.0) + loss
                counts[name] = counts.get(name, 0.0) + labels
        totals = sum_over_ranks([*sums.values(), *counts.values()], self.device)
        pairs = zip(totals[: len(sums)], totals[len(sums) :], strict=True)
        return {name: total / labels if labels else None for name, (total, labels) in zip(sums, pairs, strict=True)}
