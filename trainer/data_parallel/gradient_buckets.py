"""Main gradients of one rank: contiguous fp32 buffers, filled by backward, summed over the replicas bucket by bucket.

The buffers lie in reverse order of use, since backward fills the last layers first; a bucket is reduced as soon as the
last micro-batch has filled it, while backward goes on below it. Source: Li et al. 2020, "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", section 3.2.

Nothing here averages: the loss was divided by the number of valid tokens of the whole batch before backward, so every
sum is already the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data_parallel.pieces import ParameterPiece
from trainer.data_parallel.shared_gradients import sum_shared_gradients

if TYPE_CHECKING:
    from trainer.config import ParallelConfig
    from trainer.mesh import ParallelMesh, ProcessGroups
    from trainer.parameters import ParameterLayout
    from trainer.tensor_parallel.embedding import RowSink
    from trainer.tensor_parallel.linear import OuterProductSink

# Every gradient starts on a cache line, so that GEMMs write whole vectors.
_ALIGNMENT_ELEMENTS = 16


class _TakesGradientSink(Protocol):
    gradient_sink: OuterProductSink | None


class _TakesRowSink(Protocol):
    row_sink: RowSink | None


class GradientBuckets:
    """Main gradients of this rank's parameters, and their reduction.

    Implements trainer.data_parallel.pieces.GradientStore.
    """

    is_sharded = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, ParameterLayout],
        mesh: ParallelMesh,
        groups: ProcessGroups,
        parallel: ParallelConfig,
    ) -> None:
        """Allocate the buffer.

        Args:
            parameters: this rank's, by global name, in order of use in forward.
            layouts: says which parameters are also summed over tp or between the stages.
            mesh: this rank's place.
            groups: the axes to sum over; None where an axis has size 1.
            parallel: bucket size and overlap.
        """
        self._parameters = dict(parameters)
        self._layouts = dict(layouts)
        self._mesh = mesh
        self._groups = groups
        self._overlap = parallel.overlap_grad_reduce
        self._works: list[dist.Work] = []
        # Without overlap everything is reduced at once, for which one message is best.
        size = parallel.ddp_bucket_size or max(40_000_000, 1_000_000 * mesh.data_size) if self._overlap else None
        self._allocate(size)
        self.pieces = [
            ParameterPiece(name, 0, parameter.detach().view(-1), self._gradients[name].main.view(-1))
            for name, parameter in self._parameters.items()
        ]

    def _allocate(self, bucket_size: int | None) -> None:
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        # Experts have fewer copies than the rest and are summed over other ranks: they lie by themselves, at the end.
        for name in sorted(reversed(self._parameters), key=lambda name: self._layouts[name].is_expert):
            spans[name] = (end, end + self._parameters[name].numel())
            end = -(-spans[name][1] // _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS
        device = next(iter(self._parameters.values())).device if self._parameters else None
        self.buffer = torch.zeros(end, dtype=torch.float32, device=device)
        self._buckets = list(self._divide(spans, end, bucket_size))
        self._gradients = {
            name: _ParameterGradient(self.buffer[slice(*spans[name])].view(self._parameters[name].shape), bucket)
            for bucket in self._buckets
            for name in bucket.names
        }

    def _divide(self, spans: Mapping[str, tuple[int, int]], total: int, bucket_size: int | None) -> Iterator[_Bucket]:
        names: list[str] = []
        start = 0
        ends = [begin for begin, _ in spans.values()][1:] + [total]
        order = iter(list(spans)[1:])
        for name, end in zip(spans, ends, strict=False):
            names.append(name)
            is_expert = self._layouts[name].is_expert
            following = next(order, None)
            is_full = bucket_size is not None and end - start >= bucket_size
            if following is None or is_full or self._layouts[following].is_expert != is_expert:
                group = self._groups.expert_dp if is_expert else self._groups.dp_cp
                yield _Bucket(self, names, self.buffer[start:end], group)
                names, start = [], end

    def connect(self, chunks: Sequence[nn.Module]) -> None:
        """Make the parameters of ``chunks`` leave their gradients here; to be called once, before any backward.

        Modules with a ``gradient_sink`` or ``row_sink`` add the gradient of their ``weight`` themselves; everything
        else is fetched from ``.grad``, which is dropped.
        """
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        by_autograd: set[str] = set()
        for module in (module for chunk in chunks for module in chunk.modules()):
            for attribute, parameter in module.named_parameters(recurse=False):
                name = names[id(parameter)]
                if attribute == "weight" and _take_sink(module, self._gradients[name]):
                    self._gradients[name].sources += 1
                else:
                    by_autograd.add(name)
        for name in by_autograd:
            self._gradients[name].sources += 1
            take = _take_weakly(self._gradients[name])
            self._parameters[name].register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def main_grad(self, name: str) -> Tensor:
        """The float32 gradient of a parameter, shaped like this rank's part of it; final after ``finish``."""
        return self._gradients[name].main

    def begin(self, num_micro_batches: int) -> None:
        """See GradientStore. Costs nothing: the first contribution overwrites what the last iteration left."""
        for gradient in self._gradients.values():
            gradient.is_empty = True
            gradient.awaited = gradient.sources * num_micro_batches
        for bucket in self._buckets:
            bucket.awaited = len(bucket.names)
            bucket.is_reduced = False

    def expect_last_backward(self, chunk: int) -> None:
        """See GradientStore. Contributions are counted, so that this store need not be told."""

    def finish(self) -> None:
        """Make every main gradient final (collective: all ranks, after their last backward).

        Summed over the replicas, then as trainer.data_parallel.shared_gradients says.
        """
        for gradient in self._gradients.values():
            if gradient.is_empty:
                gradient.main.zero_()
        for bucket in self._buckets:
            bucket.awaited = 0
        self._reduce_filled()
        for work in self._works:
            work.wait()
        self._works.clear()
        sum_shared_gradients(self.pieces, self._layouts, self._mesh, self._groups)

    def weights_changed(self) -> None:
        """See GradientStore. Every replica has updated all of them."""

    def wait_for_weights(self) -> None:
        """See GradientStore. There is nothing to wait for."""

    def _reduce_filled(self) -> None:
        # In the order of the buckets and never past one that is not filled: all replicas must issue the same sequence.
        for bucket in self._buckets:
            if bucket.awaited:
                return
            if not bucket.is_reduced:
                bucket.is_reduced = True
                if bucket.group is not None:
                    work = dist.all_reduce(bucket.buffer, group=bucket.group, async_op=True)
                    assert work is not None  # only a rank outside of the group gets none
                    self._works.append(work)

    def parameter_filled(self, bucket: _Bucket) -> None:
        """A parameter of ``bucket`` has its last contribution of this iteration."""
        bucket.awaited -= 1
        if not bucket.awaited and self._overlap:
            self._reduce_filled()


def _take_sink(module: nn.Module, gradient: _ParameterGradient) -> bool:
    """Give ``module`` its sink; whether it takes one."""
    if hasattr(module, "gradient_sink"):
        cast(_TakesGradientSink, module).gradient_sink = gradient
        return True
    if hasattr(module, "row_sink"):
        cast(_TakesRowSink, module).row_sink = gradient
        return True
    return False


def _take_weakly(gradient: _ParameterGradient) -> Callable[[Tensor], None]:
    # The garbage collector does not see through a tensor's hooks: a strong reference from there would keep this model
    # and its process groups, with their threads, for as long as the process lives.
    reference = weakref.ref(gradient)

    def take(parameter: Tensor) -> None:
        target = reference()
        assert target is not None
        target.take_autograd(parameter)

    return take


class _Bucket:
    """A stretch of the buffer that is reduced by one message."""

    def __init__(
        self, owner: GradientBuckets, names: list[str], buffer: Tensor, group: dist.ProcessGroup | None
    ) -> None:
        self.owner = owner
        self.names = names
        self.group = group
        """Ranks that hold copies of its parameters; None where there are no others."""
        self.buffer = buffer
        self.awaited = 0
        """Parameters that still miss a contribution."""
        self.is_reduced = False


class _ParameterGradient:
    """Main gradient of one parameter. Is the OuterProductSink or RowSink of the modules that use it as their weight."""

    def __init__(self, main: Tensor, bucket: _Bucket) -> None:
        self.main = main
        self.bucket = bucket
        self.sources = 0
        """Contributions per micro-batch: a tied table on a single stage gets one as head and one as embedding."""
        self.awaited = 0
        """Contributions that are still missing in this iteration."""
        self.is_empty = True

    def add_outer(self, grad_output: Tensor, inputs: Tensor) -> None:
        """See OuterProductSink."""
        main = self.main.view(grad_output.shape[1], inputs.shape[1])
        transposed, beta = grad_output.t(), 0 if self.is_empty else 1
        if inputs.dtype == main.dtype:
            torch.addmm(main, transposed, inputs, beta=beta, out=main)
        elif main.is_cuda:  # allowed since torch 2.10 (pytorch#167931)
            torch.addmm(main, transposed, inputs, out_dtype=main.dtype, beta=beta, out=main)
        else:  # no GEMM of 16-bit matrices into a 32-bit one on CPU
            self._add(transposed @ inputs)
        self._count()

    def add_rows(self, rows: Tensor, grad_rows: Tensor) -> None:
        """See RowSink."""
        if self.is_empty:
            self.main.zero_()
        grad_rows = grad_rows.to(self.main.dtype)
        if self.main.is_cuda:  # where index_add_ adds in any order, and this sorts
            self.main.index_put_((rows,), grad_rows, accumulate=True)
        else:
            self.main.index_add_(0, rows, grad_rows)
        self._count()

    def take_autograd(self, parameter: Tensor) -> None:
        """Add ``parameter.grad`` and drop it."""
        assert parameter.grad is not None
        self._add(parameter.grad)
        parameter.grad = None
        self._count()

    def _add(self, gradient: Tensor) -> None:
        if self.is_empty:
            self.main.copy_(gradient.view_as(self.main))
        else:
            self.main.add_(gradient.view_as(self.main))

    def _count(self) -> None:
        self.is_empty = False
        self.awaited -= 1
        if self.awaited == 0:
            self.bucket.owner.parameter_filled(self.bucket)
