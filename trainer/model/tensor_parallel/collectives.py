"""The collectives between the tensor-parallel shards of a layer.

Legend: S sequence, B micro-batch, H hidden; ``/t`` = divided over tp. Activations are [S, B, H].

Megatron-LM's conjugate pair (Shoeybi et al. 2019, arXiv:1909.08053, section 3, figure 3): *f* copies forward and
all-reduces backward, *g* all-reduces forward and copies backward. With sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2, figure 5) f becomes gather / reduce-scatter along S and g reduce-scatter / gather. g is
``reduce_partial_sums`` here, f is ``enter_parallel_region``; a ColumnParallelLinear has its own f, whose backward
overlaps with a matrix product.
Collective: all ranks of the tp group must call each of these, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.distributed.collectives import all_gather_single, reduce_scatter_single

if TYPE_CHECKING:
    from trainer.distributed.mesh import ParallelMesh, ProcessGroups


@dataclass(frozen=True)
class TensorParallel:
    """The tp axis as layers see it."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """None when size is 1."""
    sequence_parallel: bool = False
    """Activations between tensor-parallel regions are divided along the sequence; never set when size is 1."""

    @classmethod
    def build(cls, mesh: ParallelMesh, groups: ProcessGroups, sequence_parallel: bool) -> TensorParallel:
        """The tp axis of ``mesh``."""
        return cls(mesh.tp, mesh.tp_rank, groups.tp, sequence_parallel and mesh.tp > 1)

    def sequence_shard(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor [S, ...] along the sequence, as a view.

        Without sequence parallelism all of the tensor.
        """
        if not self.sequence_parallel:
            return whole
        length = self.shard_length(whole)
        return whole.narrow(0, self.rank * length, length)

    def shard_length(self, whole: torch.Tensor) -> int:
        """S/t of a tensor [S, ...].

        Raises:
            ValueError: S is not divisible by t.
        """
        if whole.shape[0] % self.size:
            raise ValueError(
                f"tensor-parallel rank {self.rank}: a sequence of {whole.shape[0]} cannot be divided over {self.size} "
                "ranks, as sequence parallelism needs"
            )
        return whole.shape[0] // self.size


@dataclass(frozen=True)
class PendingCollective:
    """A pending collective over tp. ``result`` waits for its end."""

    _output: torch.Tensor
    _input: torch.Tensor
    """Kept alive until the collective has read it."""
    _work: dist.Work | None

    def result(self) -> torch.Tensor:
        """The output, after the collective has finished."""
        if self._work is not None:
            self._work.wait()
        return self._output


def gather_sequence(shard: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """[S, ...] from every rank's [S/t, ...]. No autograd."""
    return start_gather(shard, tp).result()


def start_gather(shard: torch.Tensor, tp: TensorParallel) -> PendingCollective:
    """Start to gather [S, ...] from every rank's [S/t, ...]. No autograd.

    An undivided tensor is the result itself.
    """
    if not tp.sequence_parallel:
        return PendingCollective(shard, shard, None)
    shard = shard.contiguous()
    whole = shard.new_empty((shard.shape[0] * tp.size, *shard.shape[1:]))
    return PendingCollective(whole, shard, all_gather_single(whole, shard, group=tp.group, async_op=True))


def start_sum(partial: torch.Tensor, tp: TensorParallel) -> PendingCollective:
    """Start to sum [S, ...] over tp. No autograd.

    Under sequence parallelism the result is this rank's [S/t, ...].

    The collective owns ``partial`` from here on: without sequence parallelism the sum overwrites it.
    """
    if tp.size == 1:
        return PendingCollective(partial, partial, None)
    partial = partial.contiguous()
    if tp.sequence_parallel:
        output = partial.new_empty((tp.shard_length(partial), *partial.shape[1:]))
        return PendingCollective(output, partial, reduce_scatter_single(output, partial, group=tp.group, async_op=True))
    return PendingCollective(partial, partial, dist.all_reduce(partial, group=tp.group, async_op=True))


class _ReducePartialSums(torch.autograd.Function):
    """*g*: sum over tp in forward.

    The gradient of every partial sum is the gradient of the sum.
    """

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, tp: TensorParallel, needs_values: bool) -> torch.Tensor:
        ctx.tp = tp
        if not tp.sequence_parallel:
            ctx.mark_dirty(partial)
        if needs_values:
            return start_sum(partial, tp).result()
        return tp.sequence_shard(partial).clone() if tp.sequence_parallel else partial

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        tp: TensorParallel = ctx.tp
        return gather_sequence(grad_output, tp), None, None


def reduce_partial_sums(partial: torch.Tensor, tp: TensorParallel, needs_values: bool = True) -> torch.Tensor:
    """*g*: the sum over tp of contiguous [S, B, H], in place.

    Under sequence parallelism the result is this rank's [S/t, B, H].

    Without ``needs_values`` (dummy forward) nothing is summed, and only the graph of the result counts.
    """
    if tp.size == 1:
        return partial
    summed: torch.Tensor = _ReducePartialSums.apply(partial, tp, needs_values)  # type: ignore[no-untyped-call]
    return summed


class _EnterParallelRegion(torch.autograd.Function):
    """*f*: the whole input in forward.

    Backward sums the tp ranks' gradients of the input.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return gather_sequence(inputs, tp) if tp.sequence_parallel else inputs.view_as(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        tp: TensorParallel = ctx.tp
        # The sum overwrites its input, and other readers of this gradient may exist.
        partial = grad_output if tp.sequence_parallel else grad_output.clone(memory_format=torch.contiguous_format)
        return start_sum(partial, tp).result(), None


def enter_parallel_region(inputs: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """*f*: [S, B, H] from [S(/t), B, H], at the start of a tensor-parallel region.

    In the region each tp rank computes a part of the gradient.
    """
    if tp.size == 1:
        return inputs
    whole: torch.Tensor = _EnterParallelRegion.apply(inputs, tp)  # type: ignore[no-untyped-call]
    return whole
