"""Torch's fused attention kernels, which also return each query's log-sum-exp for combining partial results.

Legend: B samples, A heads, G query groups, Q queries, K keys, D width of a query or key head, V of a value head.
None of them has a softcap.
Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 2 (appendix B): forward saves the output and the log-sum-exp, and
backward recomputes the scores. Given output and log-sum-exp over all keys, backward over a part of the keys returns the
contribution of that part to the gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.ops.attention.interface import (
    AttentionKernel,
    Gradients,
    Packing,
    repeat_groups,
    sum_copies,
)
from trainer.ops.attention.padded import ALIGNED_WIDTH, Padded, fitted
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.tiles import CAUSAL, FULL, Band, Tile
from trainer.ops.attention.unfused import Unfused, backward_by_rows, forward_by_rows, outside

_FLASH_CAPABILITY = (8, 0)
_FLASH_WIDTH = 256
GROUPS_ON_CPU = torch.__version__ >= "2.13"
"""True if torch's CPU kernel supports grouped heads; untested before torch 2.13."""


class TorchFlashCPU:
    """Torch's flash kernel for CPUs, for all floating dtypes and head widths with D = V.

    Bands other than the causal square are masks, by blocks of rows.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, settings: AttentionSettings, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

        def compute(
            block: Tile, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            key, value = (self._repeated(heads, query) for heads in (key, value))
            causal, mask = _cpu_mask(query, key, block.band)
            output, log_sum_exp = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=settings.scale)
            return output, log_sum_exp

        if _is_square_or_full(query, key, band):
            return compute(_whole(query, key, band), query, key, value)
        return forward_by_rows(compute, query, key, value, band)

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        settings: AttentionSettings,
        band: Band,
    ) -> Gradients:
        """See AttentionKernel."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

        def compute(
            block: Tile,
            grad_output: torch.Tensor,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *sums: torch.Tensor,
        ) -> Gradients:
            groups = key.shape[1]
            # The gradient of a key that several query heads share is the sum over its copies.
            key, value = (self._repeated(heads, query) for heads in (key, value))
            causal, mask = _cpu_mask(query, key, block.band)
            grad_query, grad_key, grad_value = flash(
                grad_output, query, key, value, *sums, 0.0, causal, attn_mask=mask, scale=settings.scale
            )
            return grad_query, sum_copies(grad_key, groups), sum_copies(grad_value, groups)

        tensors = (grad_output, query, key, value, output, log_sum_exp)
        if _is_square_or_full(query, key, band):
            return compute(_whole(query, key, band), *tensors)
        return backward_by_rows(compute, tensors, band)

    def _repeated(self, heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return heads if GROUPS_ON_CPU else _repeated(heads, query)


def _cpu_mask(query: torch.Tensor, key: torch.Tensor, band: Band) -> tuple[bool, torch.Tensor | None]:
    """Switch for the causal square, and additive mask [Q, K] of any other band."""
    if _is_square_or_full(query, key, band):
        return band == CAUSAL, None
    # The kernel reads a mask of another dtype without a check.
    mask = query.new_zeros(query.shape[2], key.shape[2])
    return False, mask.masked_fill_(outside(band, mask.shape[0], mask.shape[1], mask.device), -torch.inf)


def _whole(query: torch.Tensor, key: torch.Tensor, band: Band) -> Tile:
    return Tile(None, (0, query.shape[2]), (0, key.shape[2]), band)


def _is_square_or_full(query: torch.Tensor, key: torch.Tensor, band: Band) -> bool:
    """True for the bands that every kernel has: no limit, or the causal square."""
    return band == FULL or (band == CAUSAL and query.shape[2] == key.shape[2])


class TorchFlash:
    """Torch's flash kernel for GPUs since Ampere, with windows.

    Takes 16-bit dtypes and head widths D = V up to 256 in multiples of 8.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, settings: AttentionSettings, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel."""
        if _is_square_or_full(query, key, band):
            output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, band == CAUSAL, scale=settings.scale
            )
            return output, log_sum_exp
        heads = [part.transpose(1, 2) for part in (query, key, value)]
        lengths = query.shape[2], key.shape[2]
        output, log_sum_exp, *_ = torch.ops.aten._flash_attention_forward(
            *heads, None, None, *lengths, 0.0, False, False, scale=settings.scale, **_window(band.sides(*lengths))
        )
        return output.transpose(1, 2), log_sum_exp

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        settings: AttentionSettings,
        band: Band,
    ) -> Gradients:
        """See AttentionKernel."""
        lengths = query.shape[2], key.shape[2]
        if not _is_square_or_full(query, key, band):
            heads = [part.transpose(1, 2) for part in (grad_output, query, key, value, output)]
            grads = torch.ops.aten._flash_attention_backward(
                *heads,
                log_sum_exp.contiguous(),
                None,
                None,
                *lengths,
                0.0,
                False,
                *_no_random_state(query),
                scale=settings.scale,
                **_window(band.sides(*lengths)),
            )
            return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)
        # The kernel reads the state of the random generator only for dropout.
        seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
        gradients: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_output,
            query,
            key,
            value,
            output,
            log_sum_exp.contiguous(),
            None,
            None,
            *lengths,
            0.0,
            band == CAUSAL,
            seed,
            offset,
            scale=settings.scale,
        )
        return gradients

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
        starts, longest = packing.starts, packing.longest
        heads = [packing.tokens(part) for part in (query, key, value)]
        output, log_sum_exp, *_ = torch.ops.aten._flash_attention_forward(
            *heads,
            *(starts, starts, longest, longest),
            *(0.0, _is_causal_only(settings), False),
            scale=settings.scale,
            **_packed_window(settings),
        )
        return packing.heads(output), packing.by_sample(log_sum_exp)

    def backward_packed(self, packing: Packing, *tensors: torch.Tensor, settings: AttentionSettings) -> Gradients:
        """See PackedKernel."""
        *heads, log_sum_exp = tensors
        starts, longest = packing.starts, packing.longest
        grads = torch.ops.aten._flash_attention_backward(
            *map(packing.tokens, heads),
            packing.by_token(log_sum_exp),
            *(starts, starts, longest, longest),
            *(0.0, _is_causal_only(settings)),
            *_no_random_state(log_sum_exp),
            scale=settings.scale,
            **_packed_window(settings),
        )
        return packing.heads(grads[0]), packing.heads(grads[1]), packing.heads(grads[2])


def _no_random_state(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The kernel reads the state of the random generator only for dropout.
    return torch.zeros(2, dtype=torch.uint64, device=like.device), torch.empty(
        0, dtype=torch.uint64, device=like.device
    )


def _window(sides: tuple[int, int]) -> dict[str, int]:
    return {"window_size_left": sides[0], "window_size_right": sides[1]}


def _is_causal_only(settings: AttentionSettings) -> bool:
    return settings.causal and settings.window is None


def _packed_window(settings: AttentionSettings) -> dict[str, int]:
    return {} if settings.window is None else _window((settings.window - 1, 0))


class TorchEfficient:
    """Torch's memory-efficient kernel for GPUs since Volta.

    Head widths are multiples of 8 in 16 bits, and multiples of 4 in float32. The kernel does not group heads, so keys
    and values are repeated. Bands other than the causal square go to plain torch, by blocks of rows.
    """

    _ALIGNMENT = 32
    """The kernel pads its log-sum-exp to a multiple of this number of rows."""
    _unfused = Unfused()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, settings: AttentionSettings, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel."""
        if not _is_square_or_full(query, key, band):
            return self._unfused.forward(query, key, value, settings=settings, band=band)
        causal = band == CAUSAL
        output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, _repeated(key, query), _repeated(value, query), None, True, 0.0, causal, scale=settings.scale
        )
        return output, log_sum_exp[..., : query.shape[2]]

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        settings: AttentionSettings,
        band: Band,
    ) -> Gradients:
        """See AttentionKernel."""
        if not _is_square_or_full(query, key, band):
            tensors = (grad_output, query, key, value, output, log_sum_exp)
            return self._unfused.backward(*tensors, settings=settings, band=band)
        # The kernel takes the strides of all tensors but this one: in 16 bits it reads rows of A x D values in a row.
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
        # exp(score - inf) = 0: padding rows contribute nothing.
        padding = -log_sum_exp.shape[-1] % self._ALIGNMENT
        padded = torch.nn.functional.pad(log_sum_exp, (0, padding), value=torch.inf).contiguous()
        seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
        grad_query, grad_key, grad_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_output,
            query,
            _repeated(key, query),
            _repeated(value, query),
            None,
            output,
            padded,
            seed,
            offset,
            0.0,
            [True, True, True, False],
            band == CAUSAL,
            scale=settings.scale,
        )
        return grad_query, sum_copies(grad_key, key.shape[1]), sum_copies(grad_value, key.shape[1])


def _repeated(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return repeat_groups(heads, query.shape[1] // heads.shape[1])


def has_torch_flash(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """True if torch's flash kernel supports these heads on the GPU ``device``.

    The flash kernel is torch's only GPU kernel with grouped heads.
    """
    sixteen_bit = dtype in (torch.float16, torch.bfloat16)
    return sixteen_bit and head_dim <= _FLASH_WIDTH and torch.cuda.get_device_capability(device) >= _FLASH_CAPABILITY


def torch_kernel(dtype: torch.dtype, widths: tuple[int, int], device: torch.device) -> AttentionKernel | None:
    """Torch's best kernel for a dtype, the widths of query and value heads, and a device, or None."""
    if device.type == "cpu":
        return fitted(TorchFlashCPU(), widths, 1)
    if device.type != "cuda":
        return None
    capability: Any = torch.cuda.get_device_capability(device)
    if has_torch_flash(dtype, max(widths), device):
        return fitted(TorchFlash(), widths, ALIGNED_WIDTH)
    if dtype is torch.float64 or (dtype is torch.bfloat16 and capability < _FLASH_CAPABILITY):
        return None
    is_aligned = all(width % ALIGNED_WIDTH == 0 for width in widths)
    return TorchEfficient() if is_aligned else Padded(TorchEfficient(), ALIGNED_WIDTH)
