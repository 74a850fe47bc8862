"""Main gradients of one rank: float32 or bfloat16 buffers, reduced bucket by bucket.

Backward fills the contiguous buffers.

The buffers lie in reverse order of use, since backward fills the last layers first. A bucket is reduced as soon as the
last micro-batch has filled it, while backward continues. Source: Li et al. 2020, "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", section 3.2.

The reduction sums and never averages: the loss was divided by the number of valid tokens of the whole batch before
backward, so that every sum is already the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data_parallel.bucket_plan import PlannedBucket, plan_buckets
from trainer.data_parallel.main_gradient import MainGradient, connect_gradients
from trainer.data_parallel.parameter_shards import ParameterShard
from trainer.data_parallel.shared_gradients import sum_shared_gradients
from trainer.distributed.collectives import is_gloo

if TYPE_CHECKING:
    from trainer.config.sections.parallel import ParallelConfig
    from trainer.distributed.mesh import ParallelMesh, ProcessGroups
    from trainer.model.sharding import ParameterLayout


class GradientBuckets:
    """Main gradients of this rank's parameters, and their reduction.

    Implements trainer.data_parallel.parameter_shards.GradientStore.
    """

    is_sharded = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, ParameterLayout],
        mesh: ParallelMesh,
        groups: ProcessGroups,
        parallel: ParallelConfig,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the buffer.

        Args:
            parameters: this rank's, by global name, in order of use in forward.
            layouts: names the parameters that are also summed over tp or between the stages.
            mesh: this rank's place.
            groups: groups of the axes to sum over; None for an axis of size 1.
            parallel: bucket size and overlap.
            dtype: of the gradients, in which they are also summed over the ranks.
        """
        self._parameters = dict(parameters)
        self._layouts = dict(layouts)
        self._mesh = mesh
        self._groups = groups
        self._overlap = parallel.overlap_grad_reduce
        self._by_autograd = parallel.no_gradient_accumulation_fusion
        self._works: list[dist.Work] = []
        size = parallel.ddp_bucket_size
        if size is None and (self._overlap or (self.is_sharded and parallel.overlap_param_gather)):
            size = _default_bucket_size(mesh, groups)
        # Without overlap all gradients are sent at once, and one message is fastest.
        plan = plan_buckets(self._parameters, self._layouts, mesh, size)
        device = next(iter(self._parameters.values())).device if self._parameters else None
        self.buffer = torch.zeros(max((b.stop for b in plan), default=0), dtype=dtype, device=device)
        """Gradients with alignment gaps between them; the gaps stay zero."""
        self._buckets = [Bucket(planned, self.buffer, groups.copies(planned.is_expert)) for planned in plan]
        self._gradients = {
            name: MainGradient(
                self.buffer[start:stop].view(self._parameters[name].shape), partial(self._count_filled, bucket)
            )
            for bucket in self._buckets
            for name, (start, stop) in bucket.plan.spans.items()
        }
        self.parameter_shards = self._cut_shards()

    def _cut_shards(self) -> list[ParameterShard]:
        return [
            ParameterShard(name, 0, parameter.detach().view(-1), self._gradients[name].main.view(-1))
            for name, parameter in self._parameters.items()
        ]

    def connect(self, chunks: Sequence[nn.Module]) -> None:
        """Connect the parameters of ``chunks`` to their gradients; once, before any backward."""
        connect_gradients(chunks, self._parameters, self._gradients, by_autograd=self._by_autograd)

    def main_grad(self, name: str) -> Tensor:
        """The gradient of a parameter, shaped like this rank's part of it.

        Final after ``finish`` if the store is not sharded.
        """
        return self._gradients[name].main

    def begin(self, num_micro_batches: int) -> None:
        """See GradientStore. Costs nothing: the first contribution overwrites what the last iteration left."""
        for gradient in self._gradients.values():
            gradient.begin(num_micro_batches)
        for bucket in self._buckets:
            bucket.awaited = len(bucket.plan.spans)
            bucket.is_reduced = False

    def expect_last_backward(self, chunk: int) -> None:
        """See GradientStore. Does nothing: this store counts contributions."""

    def finish(self) -> None:
        """Make the gradients of all shards final. Collective: all ranks, after their last backward.

        Sums over the replicas first, then within a replica: see trainer.data_parallel.shared_gradients.
        """
        for gradient in self._gradients.values():
            gradient.complete()
        for bucket in self._buckets:
            bucket.awaited = 0
        self._reduce_filled()
        for work in self._works:
            work.wait()
        self._works.clear()
        sum_shared_gradients(self.parameter_shards, self._layouts, self._mesh, self._groups)

    def weights_changed(self) -> None:
        """See GradientStore. Does nothing: every replica has updated all weights."""

    def wait_for_weights(self) -> None:
        """See GradientStore. Returns at once."""

    def _reduce_filled(self) -> None:
        # In the order of the buckets, and never past an unfilled bucket: all replicas must issue the same sequence.
        for bucket in self._buckets:
            if bucket.awaited:
                return
            if not bucket.is_reduced:
                bucket.is_reduced = True
                if bucket.group is not None:
                    work = self._start_reduction(bucket, bucket.group)
                    assert work is not None  # None only for a rank outside of the group
                    self._works.append(work)

    def _start_reduction(self, bucket: Bucket, group: dist.ProcessGroup) -> dist.Work | None:
        work: dist.Work | None = dist.all_reduce(bucket.gradients, group=group, async_op=True)
        return work

    def _count_filled(self, bucket: Bucket) -> None:
        bucket.awaited -= 1
        if not bucket.awaited and self._overlap:
            self._reduce_filled()


def _default_bucket_size(mesh: ParallelMesh, groups: ProcessGroups) -> int:
    """Elements per bucket.

    Few if small messages are as fast and overlap better; else Megatron-LM's number.
    """
    group = groups.copies(False) or groups.copies(True)
    if group is not None and is_gloo(group):
        # From 2^18 elements on, all_reduce takes 3 ms per 2^20 elements (two ranks on two cores, torch 2.13).
        return 1_000_000
    return max(40_000_000, 1_000_000 * mesh.copies(False))


class Bucket:
    """A gradient bucket: a range of the buffer that one message reduces."""

    def __init__(self, plan: PlannedBucket, buffer: Tensor, group: dist.ProcessGroup | None) -> None:
        self.plan = plan
        self.group = group
        """Ranks that hold copies of the bucket's parameters; None if no other rank does."""
        self.gradients = buffer[plan.start : plan.stop]
        self.awaited = 0
        """Number of parameters without all their contributions."""
        self.is_reduced = False
