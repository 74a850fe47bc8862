"""Main gradients of one rank: contiguous fp32 buffers, filled by backward, summed over the replicas bucket by bucket.

The buffers lie in reverse order of use, since backward fills the last layers first; a bucket is reduced as soon as the
last micro-batch has filled it, while backward goes on below it. Source: Li et al. 2020, "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", section 3.2.

Nothing here averages: the loss was divided by the number of valid tokens of the whole batch before backward, so every
sum is already the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data_parallel.shared_gradients import sum_over_tensor_parallel, sum_tied_over_stages

if TYPE_CHECKING:
    from trainer.config import ParallelConfig
    from trainer.mesh import ProcessGroups
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

    One iteration: ``zero``, backward of every micro-batch with ``expect_last_backward`` before the last, ``finish``.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, ParameterLayout],
        groups: ProcessGroups,
        parallel: ParallelConfig,
        dp: int,
    ) -> None:
        """Allocate the buffer.

        Args:
            parameters: this rank's, by global name, in order of use in forward.
            layouts: says which parameters are also summed over tp or between the stages.
            groups: the axes to sum over; None where an axis has size 1.
            parallel: bucket size and overlap.
            dp: number of replicas.
        """
        self._parameters = dict(parameters)
        self._layouts = dict(layouts)
        self._groups = groups
        self._overlap = parallel.overlap_grad_reduce
        self._works: list[dist.Work] = []
        # Without overlap everything is reduced at once, for which one message is best.
        size = parallel.ddp_bucket_size or max(40_000_000, 1_000_000 * dp) if self._overlap else None
        self._allocate(size)

    def _allocate(self, bucket_size: int | None) -> None:
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name in reversed(self._parameters):
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
        for name, end in zip(spans, ends, strict=False):
            names.append(name)
            if end == total or (bucket_size is not None and end - start >= bucket_size):
                yield _Bucket(self, names, self.buffer[start:end])
                names, start = [], end

    def connect(self, stage: nn.Module) -> None:
        """Make the parameters of ``stage`` leave their gradients here; to be called once, before any backward.

        Modules with a ``gradient_sink`` or ``row_sink`` add the gradient of their ``weight`` themselves; everything
        else is fetched from ``.grad``, which is dropped.
        """
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        by_autograd: set[str] = set()
        for module in stage.modules():
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

    def zero(self) -> None:
        """Start an iteration. Costs nothing: the first contribution overwrites what the last iteration left."""
        for gradient in self._gradients.values():
            gradient.is_empty = True
            gradient.awaited = 0

    def expect_last_backward(self) -> None:
        """From here on each parameter gets its last contributions, and each bucket is reduced when it has them all."""
        if self._groups.dp is None or not self._overlap:
            return
        for gradient in self._gradients.values():
            gradient.awaited = gradient.sources
        for bucket in self._buckets:
            bucket.awaited = len(bucket.names)
            bucket.is_reduced = False

    def finish(self) -> None:
        """Make every main gradient final (collective: all ranks, after their last backward).

        Summed over dp; then over tp where sequence-sharded activations fed a replicated parameter; then between the
        first and last stage for a tied embedding table.
        """
        for gradient in self._gradients.values():
            if gradient.is_empty:
                gradient.main.zero_()
        if self._groups.dp is not None:
            for bucket in self._buckets:
                bucket.awaited = 0
            self._reduce_filled()
            for work in self._works:
                work.wait()
            self._works.clear()
            for bucket in self._buckets:
                bucket.is_reduced = False
        gradients = {name: gradient.main for name, gradient in self._gradients.items()}
        sum_over_tensor_parallel(gradients, self._layouts, self._groups.tp)
        sum_tied_over_stages(gradients, self._layouts, self._groups.embedding)

    def _reduce_filled(self) -> None:
        # In the order of the buckets and never past one that is not filled: all replicas must issue the same sequence.
        for bucket in self._buckets:
            if bucket.awaited:
                return
            if not bucket.is_reduced:
                bucket.is_reduced = True
                work = dist.all_reduce(bucket.buffer, group=self._groups.dp, async_op=True)
                assert work is not None  # only a rank outside of the group gets none
                self._works.append(work)

    def parameter_filled(self, bucket: _Bucket) -> None:
        """A parameter of ``bucket`` has its last contribution of this iteration."""
        bucket.awaited -= 1
        if not bucket.awaited:
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

    def __init__(self, owner: GradientBuckets, names: list[str], buffer: Tensor) -> None:
        self.owner = owner
        self.names = names
        self.buffer = buffer
        self.awaited = 0
        """Parameters that still miss a contribution of the last micro-batch."""
        self.is_reduced = False


class _ParameterGradient:
    """Main gradient of one parameter. Is the OuterProductSink or RowSink of the modules that use it as their weight."""

    def __init__(self, main: Tensor, bucket: _Bucket) -> None:
        self.main = main
        self.bucket = bucket
        self.sources = 0
        """Contributions per micro-batch: a tied table on a single stage gets one as head and one as embedding."""
        self.awaited = 0
        """Contributions that are missing of the last micro-batch; not above 0 before it."""
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
