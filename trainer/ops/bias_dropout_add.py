"""Bias, dropout and residual addition in one pass. Nothing is saved for backward.

Legend: S rows (positions of a sequence), B micro-batch, H hidden.
Srivastava et al. 2014, with the inverse scaling at training time. The dropout mask is a function of the seed and of
each element's index in the global tensor: Philox4x32-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1,
2, 3", section 3.3). The mask is therefore the same on every backend and for every division of the rows over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trainer.ops.autograd import with_gradient
from trainer.ops.operation import Implementation, Operation

BiasDropoutAdd = Callable[
    [torch.Tensor, "torch.Tensor | None", "torch.Tensor | None", torch.Tensor, float, int], torch.Tensor
]

# Reference Philox holds about ten 64-bit numbers per element of a chunk: 85 MiB measured, for any size of the tensor.
# For 4 Mi elements it takes 88 ms on one core of an AMD EPYC in chunks of 2^18, and 101 ms in chunks of 2^20.
_CHUNK_ELEMENTS = 1 << 20
_ROUND_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(counters: torch.Tensor, seed: int) -> torch.Tensor:
    """Four random numbers in [0, 2^32) per counter.

    Args:
        counters: int64 [...]; the result is int64 [..., 4].
        seed: 64 bits.
    """
    words = [counters & _WORD, (counters >> 32) & _WORD, torch.zeros_like(counters), torch.zeros_like(counters)]
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(10):
        # Products wrap around at 64 bits, so both halves are right although int64 is signed.
        left, right = words[0] * _ROUND_FACTORS[0], words[2] * _ROUND_FACTORS[1]
        words = [
            ((right >> 32) & _WORD) ^ words[1] ^ keys[0],
            right & _WORD,
            ((left >> 32) & _WORD) ^ words[3] ^ keys[1],
            left & _WORD,
        ]
        keys = [(key + step) & _WORD for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return torch.stack(words, dim=-1)


def kept_elements(shape: torch.Size, positions: torch.Tensor, probability: float, seed: int) -> torch.Tensor:
    """Dropout mask, True if kept, of rows ``positions`` [S] with rows of ``shape``."""
    inner, limit = shape[1:].numel(), min(round(probability * 2**32), _WORD)
    kept = torch.empty(shape, dtype=torch.bool, device=positions.device)
    rows = max(1, _CHUNK_ELEMENTS // max(1, inner))
    columns = torch.arange(inner, device=positions.device)
    for start in range(0, len(positions), rows):
        first = (positions[start : start + rows] * inner).unsqueeze(1)
        # One counter serves four neighbours. A row may begin and end in the middle of a counter.
        counters = (first >> 2) + torch.arange((inner + 6) // 4, device=positions.device)
        numbers = philox(counters, seed).flatten(1).gather(1, (first & 3) + columns)
        part = kept[start : start + rows]
        part.copy_((numbers >= limit).view(part.shape))
    return kept


class _ReferenceDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, *options: Any) -> torch.Tensor:
        bias, residual, positions, probability, seed = options
        kept = kept_elements(hidden.shape, positions, probability, seed)
        ctx.save_for_backward(kept)
        ctx.scale = 1.0 / (1.0 - probability)
        values = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if bias is not None:
            values = values + bias
        values = (values * kept).mul_(ctx.scale)
        if residual is not None:
            values += residual
        return values.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        grad_hidden = (grad * kept).mul_(ctx.scale)
        return _gradients(ctx, grad, grad_hidden)


def _gradients(ctx: Any, grad: torch.Tensor, grad_hidden: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    _, needs_bias, needs_residual, *_ = ctx.needs_input_grad
    grad_bias = grad_hidden.sum(tuple(range(grad.dim() - 1))) if needs_bias else None
    return grad_hidden, grad_bias, grad if needs_residual else None, None, None, None


def _reference(
    hidden: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    positions: torch.Tensor,
    probability: float,
    seed: int,
) -> torch.Tensor:
    """[S, ..., H] -> [S, ..., H].

    Args:
        hidden: input of the dropout.
        bias: [H], added before the dropout.
        residual: like ``hidden``, added after the dropout.
        positions: int64 [S], indices of these rows in the global tensor.
        probability: dropout probability, in [0, 1).
        seed: seed of the global tensor's mask, below 2^63.
    """
    dropped: torch.Tensor = _ReferenceDropout.apply(hidden, bias, residual, positions, probability, seed)  # type: ignore[no-untyped-call]
    return dropped


def _native(*arguments: Any) -> torch.Tensor:
    dropped: torch.Tensor = _bias_dropout_add(*arguments)
    return dropped


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    *_, positions, ctx.probability, ctx.seed = inputs
    ctx.save_for_backward(positions)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (positions,) = ctx.saved_tensors
    return _gradients(ctx, grad, _native(grad, None, None, positions, ctx.probability, ctx.seed))


_bias_dropout_add = with_gradient("bias_dropout_add", _keep, _backward)


def _example(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    shapes = (shape, shape[-1:], shape)
    leaves = [torch.randn(one, generator=generator).to(device, dtype).requires_grad_() for one in shapes]
    positions = torch.randperm(2 * shape[0], generator=generator)[: shape[0]]
    return *leaves, positions.to(device), 0.3, 1234567890123


BIAS_DROPOUT_ADD: Operation[BiasDropoutAdd] = Operation(
    "bias_dropout_add",
    {"native": Implementation(_native), "reference": Implementation(_reference)},
    [partial(_example, shape) for shape in ((3, 2, 11), (5, 2, 4104))],
)
