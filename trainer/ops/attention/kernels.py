"""Attention kernels that also return each query's log-sum-exp, for combining partial results.

Legend: B samples, A heads, G query groups, R = A/G, Q queries, K keys, D head width.
Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 2 (appendix B): forward saves the output and the log-sum-exp, and
backward recomputes the scores. Given output and log-sum-exp over all keys, backward over a part of the keys returns the
contribution of that part to the gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.ops.attention.tiled import AttentionKernel, Gradients, PackedKernel, Packing

_FLASH_CAPABILITY = (8, 0)
_FLASH_WIDTH = 256
_ALIGNED_WIDTH = 8
GROUPS_ON_CPU = torch.__version__ >= "2.13"
"""True if torch's CPU kernel supports grouped heads; untested before torch 2.13."""


def repeat_groups(heads: torch.Tensor, copies: int) -> torch.Tensor:
    """Repeat keys or values [B, G, S, D] to [B, copies x G, S, D].

    The copies of a group are neighbours.
    """
    return heads if copies == 1 else heads.repeat_interleave(copies, dim=1)


def sum_copies(grad_heads: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum the gradients of the copies to [B, G, S, D], in at least float32."""
    if grad_heads.shape[1] == groups:
        return grad_heads
    precise = torch.promote_types(grad_heads.dtype, torch.float32)
    copies = grad_heads.view(grad_heads.shape[0], groups, -1, *grad_heads.shape[2:])
    return copies.sum(2, dtype=precise).to(grad_heads.dtype)


class Unfused:
    """Attention in plain torch, with all scores of a call in memory.

    For devices and dtypes without a kernel.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel."""
        scores = _scores(query, key, causal)
        log_sum_exp = scores.logsumexp(-1)
        shares = scores.sub_(log_sum_exp.unsqueeze(-1)).exp_().to(value.dtype)
        return (shares @ value.unsqueeze(2)).flatten(1, 2), log_sum_exp.flatten(1, 2)

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        causal: bool,
    ) -> Gradients:
        """See AttentionKernel."""
        shares = _scores(query, key, causal)
        shares = shares.sub_(_grouped(log_sum_exp.unsqueeze(-1), key)).exp_()  # [B, G, R, Q, K]
        grad, grouped = _grouped(grad_output, key), _grouped(query, key)
        along = (grad_output.to(shares.dtype) * output).sum(-1, keepdim=True)
        grad_value = (shares.to(grad.dtype).mT @ grad).sum(2)
        grad_scores = (grad @ value.unsqueeze(2).mT).to(shares.dtype).sub_(_grouped(along, key)).mul_(shares)
        grad_scores = grad_scores.mul_(query.shape[-1] ** -0.5).to(query.dtype)
        grad_query = (grad_scores @ key.unsqueeze(2)).flatten(1, 2)
        return grad_query, (grad_scores.mT @ grouped).sum(2), grad_value


def _grouped(heads: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """View [B, G, R, ...] of [B, A, ...]."""
    return heads.view(heads.shape[0], key.shape[1], -1, *heads.shape[2:])


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool) -> torch.Tensor:
    """Scaled scores [B, G, R, Q, K], at least float32, with -inf for masked keys."""
    scores = _grouped(query * query.shape[-1] ** -0.5, key) @ key.unsqueeze(2).mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=key.device).triu_(1), -torch.inf)
    return scores


class TorchFlashCPU:
    """Torch's flash kernel for CPUs, for all floating dtypes and head widths."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel."""
        key, value = (self._repeated(heads, query) for heads in (key, value))
        output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
        return output, log_sum_exp

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        causal: bool,
    ) -> Gradients:
        """See AttentionKernel."""
        groups = key.shape[1]
        key, value = (self._repeated(heads, query) for heads in (key, value))
        grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output, query, key, value, output, log_sum_exp, 0.0, causal
        )
        return grad_query, sum_copies(grad_key, groups), sum_copies(grad_value, groups)

    def _repeated(self, heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return heads if GROUPS_ON_CPU else _repeated(heads, query)


class TorchFlash:
    """Torch's flash kernel for GPUs since Ampere.

    Takes 16-bit dtypes and head widths up to 256 in multiples of 8.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel."""
        output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=self._scale
        )
        return output, log_sum_exp

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        causal: bool,
    ) -> Gradients:
        """See AttentionKernel."""
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
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            seed,
            offset,
            scale=self._scale,
        )
        return gradients

    def forward_packed(
        self, packing: Packing, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PackedKernel."""
        starts, longest = packing.starts, packing.longest
        heads = [packing.tokens(part) for part in (query, key, value)]
        output, log_sum_exp, *_ = torch.ops.aten._flash_attention_forward(
            *heads, starts, starts, longest, longest, 0.0, True, False, scale=self._scale
        )
        return packing.heads(output), packing.by_sample(log_sum_exp)

    def backward_packed(self, packing: Packing, *tensors: torch.Tensor) -> Gradients:
        """See PackedKernel."""
        *heads, log_sum_exp = tensors
        starts, longest = packing.starts, packing.longest
        # The kernel reads the state of the random generator only for dropout.
        state = torch.zeros(2, dtype=torch.uint64, device=log_sum_exp.device)
        grads = torch.ops.aten._flash_attention_backward(
            *map(packing.tokens, heads),
            packing.by_token(log_sum_exp),
            starts,
            starts,
            longest,
            longest,
            0.0,
            True,
            state,
            torch.empty(0, dtype=torch.uint64, device=log_sum_exp.device),
            scale=self._scale,
        )
        return packing.heads(grads[0]), packing.heads(grads[1]), packing.heads(grads[2])


class TorchEfficient:
    """Torch's memory-efficient kernel for GPUs since Volta.

    Head widths are multiples of 8 in 16 bits, and multiples of 4 in float32. The kernel does not group heads, so keys
    and values are repeated.
    """

    _ALIGNMENT = 32
    """The kernel pads its log-sum-exp to a multiple of this number of rows."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel."""
        output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, _repeated(key, query), _repeated(value, query), None, True, 0.0, causal, scale=self._scale
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
        causal: bool,
    ) -> Gradients:
        """See AttentionKernel."""
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
            causal,
            scale=self._scale,
        )
        return grad_query, sum_copies(grad_key, key.shape[1]), sum_copies(grad_value, key.shape[1])


class Padded:
    """Wrapper that pads heads with zero channels to a width in multiples of 8.

    Zero channels do not change the scores.
    """

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel."""
        output, log_sum_exp = self._kernel.forward(_padded(query), _padded(key), _padded(value), causal=causal)
        return output[..., : query.shape[-1]], log_sum_exp

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        causal: bool,
    ) -> Gradients:
        """See AttentionKernel."""
        width = query.shape[-1]
        query, key, value = _padded(query), _padded(key), _padded(value)
        grad_output, output = _padded(grad_output), _padded(output)
        grads = self._kernel.backward(grad_output, query, key, value, output, log_sum_exp, causal=causal)
        grad_query, grad_key, grad_value = (grad[..., :width] for grad in grads)
        return grad_query, grad_key, grad_value


class PaddedPacked(Padded):
    """``Padded`` for a kernel that takes packed documents."""

    def __init__(self, kernel: PackedKernel) -> None:
        super().__init__(kernel)
        self._packed = kernel

    def forward_packed(
        self, packing: Packing, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PackedKernel."""
        output, log_sum_exp = self._packed.forward_packed(packing, _padded(query), _padded(key), _padded(value))
        return output[..., : query.shape[-1]], log_sum_exp

    def backward_packed(self, packing: Packing, *tensors: torch.Tensor) -> Gradients:
        """See PackedKernel."""
        *heads, log_sum_exp = tensors
        padded = [*map(_padded, heads), log_sum_exp]
        grads = self._packed.backward_packed(packing, *padded)
        grad_query, grad_key, grad_value = (grad[..., : heads[0].shape[-1]] for grad in grads)
        return grad_query, grad_key, grad_value


def _padded(heads: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(heads, (0, -heads.shape[-1] % _ALIGNED_WIDTH))


def _repeated(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return repeat_groups(heads, query.shape[1] // heads.shape[1])


def has_torch_flash(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """True if torch's flash kernel supports these heads on the GPU ``device``.

    The flash kernel is torch's only GPU kernel with grouped heads.
    """
    sixteen_bit = dtype in (torch.float16, torch.bfloat16)
    return sixteen_bit and head_dim <= _FLASH_WIDTH and torch.cuda.get_device_capability(device) >= _FLASH_CAPABILITY


def torch_kernel(dtype: torch.dtype, head_dim: int, device: torch.device) -> AttentionKernel | None:
    """Torch's best kernel for a dtype, head width and device, or None."""
    if device.type == "cpu":
        return TorchFlashCPU()
    if device.type != "cuda":
        return None
    capability: Any = torch.cuda.get_device_capability(device)
    kernel: AttentionKernel
    if has_torch_flash(dtype, head_dim, device):
        kernel = TorchFlash(head_dim**-0.5)
    elif dtype is torch.float64 or (dtype is torch.bfloat16 and capability < _FLASH_CAPABILITY):
        return None
    else:
        kernel = TorchEfficient(head_dim**-0.5)
    if head_dim % _ALIGNED_WIDTH == 0:
        return kernel
    return PaddedPacked(kernel) if isinstance(kernel, PackedKernel) else Padded(kernel)
