"""ZeRO stage 1: each rank keeps masters and moments of its shard only.

Each gradient bucket is divided evenly over the ranks that hold copies of its parameters. A rank gets the sum of its
shard (reduce-scatter), updates the weights of the shard, and sends them to all ranks (all-gather); together they move
as much as one all-reduce. Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (arXiv:1910.02054), sections 5.1 and 7.2.1.

The weights lie in buffers that are divided like the gradients, so that a bucket is gathered in place. The gather starts
right after the optimizer step, in the order of use, and each part of the model waits for its weights before it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data_parallel.gradient_buckets import Bucket, GradientBuckets
from trainer.data_parallel.parameter_shards import ParameterShard
from trainer.distributed.collectives import all_gather_single, is_gloo, reduce_scatter_single

if TYPE_CHECKING:
    from trainer.config.sections.parallel import ParallelConfig
    from trainer.distributed.mesh import ParallelMesh, ProcessGroups
    from trainer.model.sharding import ParameterLayout


class ShardedBuckets(GradientBuckets):
    """Main gradients of this rank's parameters; the rank updates one shard of every bucket.

    Implements trainer.data_parallel.parameter_shards.GradientStore. The parameters move to buffers of this store. They
    may be read in the forward of any module below a chunk, and elsewhere after ``wait_for_weights``.
    """

    is_sharded = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, ParameterLayout],
        mesh: ParallelMesh,
        groups: ProcessGroups,
        parallel: ParallelConfig,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the buffers and move the parameters there. See GradientBuckets."""
        self._overlap_param_gather = parallel.overlap_param_gather
        # By the bucket's start in the gradient buffer, in order of use in forward.
        self._weights: dict[int, _BucketWeights] = {}
        super().__init__(parameters, layouts, mesh, groups, parallel, dtype)

    def _cut_shards(self) -> list[ParameterShard]:
        parameter_shards: dict[str, ParameterShard] = {}
        for bucket in sorted(self._buckets, key=lambda bucket: bucket.plan.first_use):
            weights = _BucketWeights(bucket, self._mesh.copy_rank(bucket.plan.is_expert), self._parameters)
            self._weights[bucket.plan.start] = weights
            parameter_shards |= {shard.name: shard for shard in weights.parameter_shards(self.buffer)}
        return [parameter_shards[name] for name in self._parameters if name in parameter_shards]

    def connect(self, chunks: Sequence[nn.Module]) -> None:
        """Connect parameters to their gradients, and modules to the weights' gathers; once."""
        super().connect(chunks)
        if not self._overlap_param_gather:
            return
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        bucket_of = {name: weights for weights in self._weights.values() for name in weights.bucket.plan.spans}
        for module, parameters in _waiting_modules(chunks):
            needed = list(dict.fromkeys(bucket_of[names[id(parameter)]] for parameter in parameters))
            if any(weights.bucket.group is not None for weights in needed):
                module.register_forward_pre_hook(partial(_wait_before_forward, needed))

    def finish(self) -> None:
        """See GradientBuckets. Afterwards the optimizer may write weights."""
        # A gather of weights that no forward has used may still read the buffers that the optimizer will write.
        self.wait_for_weights()
        super().finish()

    def weights_changed(self) -> None:
        """See GradientStore."""
        for weights in self._weights.values():
            weights.start_gather()
        if not self._overlap_param_gather:
            self.wait_for_weights()

    def wait_for_weights(self) -> None:
        """See GradientStore. Costs nothing if no gather is pending."""
        for weights in self._weights.values():
            weights.wait()

    def _start_reduction(self, bucket: Bucket, group: dist.ProcessGroup) -> dist.Work | None:
        if is_gloo(group):  # gloo's reduce_scatter takes twice as long
            return super()._start_reduction(bucket, group)
        start, stop = self._weights[bucket.plan.start].shard
        work: dist.Work | None = reduce_scatter_single(
            self.buffer[start:stop], bucket.gradients, group=group, async_op=True
        )
        return work


class _BucketWeights:
    """The weights of one bucket, and their pending all-gather."""

    def __init__(self, bucket: Bucket, place: int, parameters: Mapping[str, nn.Parameter]) -> None:
        """Move the parameters of ``bucket`` into a buffer divided like its gradients.

        Args:
            bucket: the gradients.
            place: number of this rank's shard.
            parameters: of at least this bucket, by global name.
        """
        self.bucket = bucket
        plan = bucket.plan
        self.shard = plan.shard(place)
        """Start and stop in the gradient buffer."""
        first = parameters[next(iter(plan.spans))]
        self._buffer = torch.zeros(plan.stop - plan.start, dtype=first.dtype, device=first.device)
        for name, (start, stop) in plan.spans.items():
            parameter = parameters[name]
            place_in_buffer = self._buffer[start - plan.start : stop - plan.start].view(parameter.shape)
            place_in_buffer.copy_(parameter.detach())
            parameter.data = place_in_buffer
        self._works: list[dist.Work] = []

    def parameter_shards(self, gradients: Tensor) -> Iterator[ParameterShard]:
        """The parameter shards in this rank's shard of the bucket."""
        offset = self.bucket.plan.start
        for name, (start, stop) in self.bucket.plan.spans.items():
            low, high = max(start, self.shard[0]), min(stop, self.shard[1])
            if low < high:
                yield ParameterShard(name, low - start, self._buffer[low - offset : high - offset], gradients[low:high])

    def start_gather(self) -> None:
        """Start to all-gather the shards. Collective: the ranks with copies of the bucket."""
        group = self.bucket.group
        if group is None:
            return
        shards = self._buffer.chunk(self.bucket.plan.copies)
        if is_gloo(group):
            # 64 MiB over two ranks: 26 ms by broadcasts, 66 ms by all_reduce, 102 ms by all_gather (two cores, torch
            # 2.13); over four ranks 72, 165 and 312 ms.
            works = [
                dist.broadcast(shard, group=group, group_src=source, async_op=True)
                for source, shard in enumerate(shards)
            ]
        else:
            own = shards[dist.get_rank(group)]
            works = [all_gather_single(self._buffer, own, group=group, async_op=True)]
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        """Wait until all weights have arrived."""
        for work in self._works:
            work.wait()
        self._works.clear()


def _wait_before_forward(needed: Sequence[_BucketWeights], _module: nn.Module, _inputs: object) -> None:
    for weights in needed:
        weights.wait()


def _waiting_modules(chunks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Modules that wait before they run, with their parameters.

    Each part of a chunk waits for all parameters below it.

    A part waits as a whole, not its innermost modules, since modules may use the weights of their children directly.
    """
    for chunk in chunks:
        yield chunk, list(chunk.parameters(recurse=False))
        waiting = list(chunk.children())
        while waiting:
            module = waiting.pop(0)
            if isinstance(module, nn.ModuleList | nn.ModuleDict):  # these never run themselves
                waiting = [*module.children(), *waiting]
            else:
                yield module, list(module.parameters())
