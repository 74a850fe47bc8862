"""Activation recompute: tensors that forward keeps, and parts that backward computes again.

Chen et al. 2016 (arXiv:1604.06174), section 3; in parts of layers only: Korthikanti et al. 2022 (arXiv:2205.05198),
section 5. No random state is saved: dropout draws from streams addressed by their purpose
(trainer.distributed.random_streams), so that a replay repeats its masks. Collectives inside a recomputed part run
again in backward, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from trainer.config.sections.training import TrainingConfig


class Recomputable(Protocol):
    """A part of the forward pass that can run twice."""

    def __call__(self, *tensors: Tensor, needs_values: bool) -> Tensor:
        """The result for ``tensors``.

        Without ``needs_values`` this is a dummy forward: only the graph behind the result counts. Nobody reads the
        values, and work that serves only them, such as the last matrix product and its sum over tp, may be left out.
        """


class _Recompute(torch.autograd.Function):
    """Keeps only the inputs; backward runs the function again.

    Backward runs the function with a graph, and then that graph's backward.
    """

    @staticmethod
    def forward(ctx: Any, function: Recomputable, *tensors: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors, needs_values=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [
            tensor.detach().requires_grad_(is_wanted)
            for tensor, is_wanted in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad():
            output = ctx.function(*inputs, needs_values=False)
        # A separate backward, so that gradient accumulators and parameter hooks receive each contribution once.
        torch.autograd.backward(output, grad_output)
        return None, *(tensor.grad for tensor in inputs)


def recompute(function: Recomputable, *tensors: Tensor) -> Tensor:
    """``function(*tensors)``, keeping only ``tensors`` for backward, which runs the function again.

    Collective if ``function`` is; its backward then always is, in the same order on all ranks.

    Args:
        function: may use parameters besides its arguments; their gradients accumulate as usual. It must compute the
            same result both times and must not change its arguments.
        tensors: if none requires a gradient, there is no backward, and the function runs without recompute.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return function(*tensors, needs_values=True)
    output: Tensor = _Recompute.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return output


@contextmanager
def forget(result: Tensor, compute_again: Callable[[], Tensor]) -> Iterator[None]:
    """Within this context, recompute ``result`` in backward instead of keeping it.

    For cheap results of kept inputs, such as norms: each op that uses the result computes it again separately.

    Args:
        result: has the memory layout of ``compute_again``'s result; views of it are recognised too.
        compute_again: returns the same numbers; called without gradients. It must not refer to ``result``.
    """
    if not torch.is_grad_enabled():
        yield
        return
    memory = result.untyped_storage().data_ptr()

    def pack(saved: Tensor) -> Tensor | _Forgotten:
        if saved.untyped_storage().data_ptr() != memory:
            return saved
        return _Forgotten(tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

    def unpack(packed: Tensor | _Forgotten) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return compute_again().as_strided(packed.shape, packed.stride, packed.offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@dataclass(frozen=True)
class _Forgotten:
    """Shape and strides, within the recomputed result, of a tensor that is not kept."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class RecomputePlan:
    """Parts that one virtual stage recomputes.

    Attributes:
        modules: recomputed parts of every layer, out of core_attn, mlp, mlp_act, layernorm, moe and moe_act.
        groups: consecutive layers, counted within the stage; only the input of a group's first layer is kept.
    """

    modules: frozenset[str] = frozenset()
    groups: tuple[range, ...] = ()

    def runs(self, num_layers: int) -> tuple[range, ...]:
        """All ``num_layers`` layers of the stage in order.

        First the groups, then each remaining layer by itself.
        """
        done = self.groups[-1].stop if self.groups else 0
        return (*self.groups, *(range(layer, layer + 1) for layer in range(done, num_layers)))

    def modules_of(self, layer: int) -> frozenset[str]:
        """Parts that a layer of the stage recomputes itself.

        ``layer`` stands for all of them.
        """
        return frozenset({"layer"}) if range(layer, layer + 1) in self.groups else self.modules

    @classmethod
    def build(cls, training: TrainingConfig, num_layers: int) -> RecomputePlan:
        """The plan of a virtual stage with ``num_layers`` layers.

        Counts as Megatron-LM does. ``uniform`` puts all layers of the stage into groups of recompute_num_layers, the
        last of which may be smaller; ``block`` makes each of the first recompute_num_layers layers its own group.
        """
        if training.recompute_granularity is None:
            return cls()
        if training.recompute_granularity == "selective":
            return cls(modules=frozenset(training.recompute_modules or ["core_attn"]))
        count = training.recompute_num_layers or 1
        if training.recompute_method == "block":
            return cls(groups=tuple(range(layer, layer + 1) for layer in range(min(count, num_layers))))
        starts = range(0, num_layers, count)
        return cls(groups=tuple(range(start, min(start + count, num_layers)) for start in starts))
