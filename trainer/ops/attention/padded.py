"""Zero channels around a kernel that needs other head widths.

Legend: D width of a query or key head, V of a value head. Zero channels change neither scores nor the other channels.
"""

from __future__ import annotations

import torch

from trainer.ops.attention.interface import AttentionKernel, Gradients, PackedKernel, Packing
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.tiles import Band

ALIGNED_WIDTH = 8
"""GPU kernels take head widths in multiples of this number."""


class Padded:
    """Wrapper that pads queries, keys and values to one width, the next multiple of ``multiple``."""

    def __init__(self, kernel: AttentionKernel, multiple: int) -> None:
        self._kernel = kernel
        self._multiple = multiple

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, settings: AttentionSettings, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel."""
        output, log_sum_exp = self._kernel.forward(*self._padded(query, key, value), settings=settings, band=band)
        return output[..., : value.shape[-1]], log_sum_exp

    def backward(self, *tensors: torch.Tensor, settings: AttentionSettings, band: Band) -> Gradients:
        """See AttentionKernel."""
        *heads, log_sum_exp = tensors
        grad_output, query, key, value, output = self._padded(*heads)
        grads = self._kernel.backward(grad_output, query, key, value, output, log_sum_exp, settings=settings, band=band)
        return _cut(grads, heads)

    def _padded(self, *heads: torch.Tensor) -> list[torch.Tensor]:
        widest = max(part.shape[-1] for part in heads)
        width = widest + -widest % self._multiple
        return [torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in heads]


class PaddedPacked(Padded):
    """``Padded`` for a kernel that takes packed documents."""

    def __init__(self, kernel: PackedKernel, multiple: int) -> None:
        super().__init__(kernel, multiple)
        self._packed = kernel

    def forward_packed(
        self,
        packing: Packing,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        settings: AttentionSettings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PackedKernel."""
        padded = self._padded(query, key, value)
        output, log_sum_exp = self._packed.forward_packed(packing, *padded, settings=settings)
        return output[..., : value.shape[-1]], log_sum_exp

    def backward_packed(self, packing: Packing, *tensors: torch.Tensor, settings: AttentionSettings) -> Gradients:
        """See PackedKernel."""
        *heads, log_sum_exp = tensors
        grad_output, query, key, value, output = self._padded(*heads)
        grads = self._packed.backward_packed(
            packing, grad_output, query, key, value, output, log_sum_exp, settings=settings
        )
        return _cut(grads, heads)


def _cut(grads: Gradients, heads: list[torch.Tensor]) -> Gradients:
    """The gradients without the padding; ``heads`` begin with output gradient, query, key and value."""
    grad_query, grad_key, grad_value = (
        grad[..., : part.shape[-1]] for grad, part in zip(grads, heads[1:4], strict=True)
    )
    return grad_query, grad_key, grad_value


def fitted(kernel: AttentionKernel, widths: tuple[int, int], multiple: int) -> AttentionKernel:
    """The kernel for query and value heads of these widths; padded if it needs one width in ``multiple``s."""
    if widths[0] == widths[1] and widths[0] % multiple == 0:
        return kernel
    return PaddedPacked(kernel, multiple) if isinstance(kernel, PackedKernel) else Padded(kernel, multiple)
