"""Main gradients, and the hooks by which modules accumulate into them.

Legend: N tokens, E experts of this rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.model.moe.grouped_products import Offsets, grouped_outer
from trainer.model.tensor_parallel.embedding import add_to_rows


class MainGradient:
    """Main gradient of one parameter: backward's sum over the micro-batches of an iteration.

    The first contribution of an iteration overwrites the last iteration's sum, so that no pass fills it with zeros.
    Implements WeightGradientAccumulator, GroupedWeightGradientAccumulator and RowGradientAccumulator for the modules
    that use the parameter as their weight.
    """

    def __init__(self, main: Tensor, on_filled: Callable[[], None]) -> None:
        """Start without contributions.

        Args:
            main: float32 or bfloat16, shaped like the parameter; any contents.
            on_filled: called after the last contribution of an iteration.
        """
        self.main = main
        self._on_filled = on_filled
        self.sources = 0
        """Contributions per micro-batch: a tied table on a single stage gets two, from the head and the embedding."""
        self._awaited = 0
        self._is_empty = True

    def begin(self, num_micro_batches: int) -> None:
        """Start an iteration of ``num_micro_batches``. Costs nothing."""
        self._is_empty = True
        self._awaited = self.sources * num_micro_batches

    def complete(self) -> None:
        """Set the gradient to zero if the iteration had no contribution."""
        if self._is_empty:
            self.main.zero_()

    def add_outer(self, grad_output: Tensor, inputs: Tensor) -> None:
        """See linear.WeightGradientAccumulator. ``inputs`` are cast to the dtype of ``grad_output``."""
        self.add_part_of_outer(grad_output, inputs)
        self._count()

    def add_part_of_outer(self, grad_output: Tensor, inputs: Tensor) -> None:
        """See linear.WeightGradientAccumulator."""
        rows = inputs.to(grad_output.dtype)
        self._add_product(self.main.view(grad_output.shape[1], inputs.shape[1]), grad_output, rows)
        self._is_empty = False

    def add_grouped_outer(self, grad_output: Tensor, inputs: Tensor, offsets: Offsets) -> None:
        """Add ``grad_output_e^T @ inputs_e`` to the slice of every expert e of a weight [E, ..., in].

        One contribution, even if no expert has tokens. A slice without tokens does not change. With offsets on the
        device all products are one launch, rounded to the dtype of the factors before they are added.

        Args:
            grad_output: [N, out], the tokens sorted by expert; ``out`` spans all dims between the first and the last.
            inputs: [N, in], in the same order.
            offsets: E + 1 ascending numbers; expert e has the rows from offsets[e] to offsets[e + 1].
        """
        if isinstance(offsets, Tensor):
            products = grouped_outer(grad_output, inputs, offsets)
            self._add(self.main.view(products.shape), products)
            self._count()
            return
        experts = self.main.view(len(offsets) - 1, grad_output.shape[1], inputs.shape[1])
        for expert, low, high in zip(experts, offsets, offsets[1:], strict=False):
            if low < high:
                self._add_product(expert, grad_output[low:high], inputs[low:high])
            elif self._is_empty:
                expert.zero_()
        self._count()

    def add_rows(self, rows: Tensor, grad_rows: Tensor) -> None:
        """See trainer.model.tensor_parallel.embedding.RowGradientAccumulator."""
        if self._is_empty:
            self.main.zero_()
        add_to_rows(self.main, rows, grad_rows)
        self._count()

    def take_autograd(self, parameter: Tensor) -> None:
        """Add ``parameter.grad`` and drop it."""
        assert parameter.grad is not None
        self._add(self.main, parameter.grad.view_as(self.main))
        parameter.grad = None
        self._count()

    def _add_product(self, target: Tensor, grad_output: Tensor, inputs: Tensor) -> None:
        transposed, beta = grad_output.t(), 0 if self._is_empty else 1
        if inputs.dtype == target.dtype:
            torch.addmm(target, transposed, inputs, beta=beta, out=target)
        elif target.is_cuda:  # allowed since torch 2.10 (pytorch#167931)
            torch.addmm(target, transposed, inputs, out_dtype=target.dtype, beta=beta, out=target)
        else:  # no GEMM of 16-bit matrices into a 32-bit one on CPU
            self._add(target, transposed @ inputs)

    def _add(self, target: Tensor, gradient: Tensor) -> None:
        if self._is_empty:
            target.copy_(gradient)
        else:
            target.add_(gradient)

    def _count(self) -> None:
        # A further contribution would be added to a buffer that is being reduced.
        assert self._awaited > 0, "too many contributions: connected modules must give one per micro-batch"
        self._is_empty = False
        self._awaited -= 1
        if self._awaited == 0:
            self._on_filled()


def connect_gradients(
    chunks: Sequence[nn.Module],
    parameters: Mapping[str, nn.Parameter],
    gradients: Mapping[str, MainGradient],
    *,
    by_autograd: bool = False,
) -> None:
    """Connect the parameters of ``chunks`` to their main ``gradients``, both by global name.

    Modules with a ``gradient_accumulator`` or ``row_accumulator`` add the gradient of their ``weight`` themselves;
    all other gradients are taken from ``.grad``, which is dropped. ``by_autograd`` also takes the weights of matrix
    products from ``.grad``.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    fetched: dict[str, None] = {}
    accumulators = ("row_accumulator",) if by_autograd else ("gradient_accumulator", "row_accumulator")
    for module in (module for chunk in chunks for module in chunk.modules()):
        for attribute, parameter in module.named_parameters(recurse=False):
            name = names[id(parameter)]
            if attribute == "weight" and _take_accumulator(module, accumulators, gradients[name]):
                gradients[name].sources += 1
            else:
                fetched[name] = None
    for name in fetched:
        gradients[name].sources += 1
        parameters[name].register_post_accumulate_grad_hook(_take_weakly(gradients[name]))  # type: ignore[no-untyped-call]


def _take_accumulator(module: nn.Module, accumulators: Sequence[str], gradient: MainGradient) -> bool:
    """Set the module's accumulator; True if ``module`` has one."""
    for attribute in accumulators:
        if hasattr(module, attribute):
            setattr(cast(Any, module), attribute, gradient)
            return True
    return False


def _take_weakly(gradient: MainGradient) -> Callable[[Tensor], None]:
    # The garbage collector cannot follow a tensor's hooks: a strong reference from a hook would keep this model and its
    # process groups, with their threads, until the process ends.
    reference = weakref.ref(gradient)

    def take(parameter: Tensor) -> None:
        target = reference()
        assert target is not None
        target.take_autograd(parameter)

    return take
