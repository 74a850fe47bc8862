"""Reference of the attention tests: dense scores in float64, by the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.distributed.random_streams import MicroBatchRandomness, seeded_generator
from trainer.ops.bias_dropout_add import philox

Bounds = Sequence[Sequence[int]]


def mask(
    length: int,
    bounds: Bounds | None,
    batch: int,
    keys: int | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """Mask [B, 1, Q, K], True where a query may attend.

    A query attends to no later keys, to the last ``window`` of them, and only within its document. The last query has
    the position of the last key.
    """
    keys = length if keys is None else keys
    query_position, key_position = torch.arange(keys - length, keys)[:, None], torch.arange(keys)
    seen = torch.ones(length, keys, dtype=torch.bool)
    if causal:
        seen &= key_position <= query_position
    if window is not None:
        # The rule of transformers 5.23.0, masking_utils.sliding_window_overlay.
        seen &= key_position > query_position - window
    seen = seen.expand(batch, 1, length, keys)
    if bounds is None:
        return seen
    numbers = torch.stack(
        [torch.bucketize(torch.arange(length), torch.tensor(ends[1:]), right=True) for ends in bounds]
    )
    return seen & (numbers[:, None, :, None] == numbers[:, None, None, :])


def kept_weights(
    batch: int, heads: int, queries: int, keys: int, probability: float, randomness: MicroBatchRandomness
) -> torch.Tensor:
    """Mask [B, A, Q, K], True for a weight that dropout keeps in self-attention of layer 3: by the formula."""
    seeds = [randomness.dropout_seed("attention", 3, part) for part in range(2)]
    rows = philox(torch.arange(heads * batch * queries), seeds[0]).view(heads, batch, queries, 1, 4).transpose(0, 1)
    columns = philox(torch.arange(keys), seeds[1])[:, 0]
    hashed = (rows[..., 0] ^ columns) * (rows[..., 1] ^ 2**31 | 1) % 2**32
    hashed = (hashed ^ hashed >> 15) * 0x2C1B3C6D % 2**32
    return (hashed ^ 2**31) >= probability * 2**32


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds | None = None,
    kept: torch.Tensor | None = None,
    dropout: float = 0.0,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, A, Q, V] in float64; ``kept`` [B, A, Q, K] is True for weights that dropout keeps."""
    repeats = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(heads.double().repeat_interleave(repeats, 1) for heads in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    seen = mask(query.shape[2], bounds, len(query), key.shape[2], causal=causal, window=window)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    shares = scores.softmax(-1)[..., : key.shape[2]]
    if kept is not None:
        shares = shares * kept / (1 - dropout)
    return shares @ value


def heads(
    batch: int,
    number: int,
    groups: int,
    length: int,
    width: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    *,
    keys: int | None = None,
    value_width: int | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value in a projection's memory layout, and an output gradient.

    The memory layout is [S, B, heads, D].
    """
    generator = seeded_generator("cpu", "attention", seed)
    keys, value_width = keys or length, value_width or width
    shapes = [
        (length, batch, number, width),
        (keys, batch, groups, width),
        (keys, batch, groups, value_width),
        (length, batch, number, value_width),
    ]
    *inputs, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [part.to(dtype).permute(1, 2, 0, 3).requires_grad_() for part in inputs], grad.to(dtype).permute(1, 2, 0, 3)


def gradients(output: torch.Tensor, inputs: Sequence[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of ``inputs``, in float64."""
    found = torch.autograd.grad(output, inputs, grad.to(output.dtype))
    return [part.detach().double() for part in (output, *found)]


def worst(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the largest expected entry."""
    largest = max(float(other.abs().max()) for other in expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.isfinite().all()
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)) / largest
