"""Activation recompute: what is kept of the forward pass, and what backward computes again.

Chen et al. 2016 (arXiv:1604.06174), section 3; in parts of layers only: Korthikanti et al. 2022 (arXiv:2205.05198),
section 5. No random state is saved: dropout draws from streams addressed by what they are for
(trainer.distributed.random_streams), so that a replay repeats its masks. Collectives inside of what is recomputed run
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
    from trainer.config.sections import TrainingConfig


class Recomputable(Protocol):
    """A part of the forward pass that can run twice."""

    def __call__(self, *tensors: Tensor, needs_values: bool) -> Tensor:
        """The result of ``tensors``.

        Where ``needs_values`` is False only the graph behind the result counts: its values are never read, and
        whatever serves nothing but them, such as the last matrix product and its sum over tp, may be left out.
        """


class _Recompute(torch.autograd.Function):
    """Keeps its inputs only; backward runs the function again, this time with a graph, and goes back through that."""

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
        # A backward of its own, so that sinks and hooks of parameters get their contributions from it, once each.
        torch.autograd.backward(output, grad_output)
        return None, *(tensor.grad for tensor in inputs)


def recompute(function: Recomputable, *tensors: Tensor) -> Tensor:
    """``function(*tensors)``, of which only ``tensors`` are kept for backward, which runs it again.

    Collective where ``function`` is; its backward always is then, in the same order on all ranks.

    Args:
        function: may use parameters beside its arguments, whose gradients are accumulated as ever. It must compute the
            same both times and leave its arguments as they are.
        tensors: without any that requires a gradient there is nothing to go back to, and the function just runs.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return function(*tensors, needs_values=True)
    output: Tensor = _Recompute.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return output


@contextmanager
def forget(result: Tensor, compute_again: Callable[[], Tensor]) -> Iterator[None]:
    """What is run inside may use ``result``, but backward finds it by ``compute_again()`` instead of keeping it.

    For cheap results of kept inputs, such as norms: each of what uses it computes it again by itself.

    Args:
        result: laid out in memory as ``compute_again`` lays it out; views of it are recognised too.
        compute_again: gives the same numbers; called without gradients. It must not refer to ``result``.
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
    """How a tensor that is not kept lay in the memory of the result that is."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class RecomputePlan:
    """What one virtual stage recomputes.

    Attributes:
        modules: parts of every layer, out of core_attn, mlp, layernorm, moe and moe_act.
        groups: consecutive layers, counted within the stage, of which only the first one's input is kept.
    """

    modules: frozenset[str] = frozenset()
    groups: tuple[range, ...] = ()

    def runs(self, num_layers: int) -> tuple[range, ...]:
        """All ``num_layers`` layers of the stage in order: the groups, then one by one those in none of them."""
        done = self.groups[-1].stop if self.groups else 0
        return (*self.groups, *(range(layer, layer + 1) for layer in range(done, num_layers)))

    def modules_of(self, layer: int) -> frozenset[str]:
        """What a layer of the stage recomputes of itself; ``layer`` stands for all of it."""
        return frozenset({"layer"}) if range(layer, layer + 1) in self.groups else self.modules

    @classmethod
    def build(cls, training: TrainingConfig, num_layers: int) -> RecomputePlan:
        """The plan of a virtual stage with ``num_layers`` layers.

        As Megatron-LM counts: with ``uniform`` all layers of the stage in groups of recompute_num_layers, the last of
        which may be smaller; with ``block`` the first recompute_num_layers layers of the stage, each by itself.
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
