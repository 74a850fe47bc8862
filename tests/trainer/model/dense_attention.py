"""Reference of the attention tests: dense scores in float64, by the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.distributed.random_streams import seeded_generator

Bounds = Sequence[Sequence[int]]


def mask(length: int, bounds: Bounds | None, batch: int) -> torch.Tensor:
    """Mask [B, 1, S, S], True where a query may attend.

    A query attends to no later keys, and only within its document.
    """
    seen = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, length, length)
    if bounds is None:
        return seen
    numbers = torch.stack(
        [torch.bucketize(torch.arange(length), torch.tensor(ends[1:]), right=True) for ends in bounds]
    )
    return seen & (numbers[:, None, :, None] == numbers[:, None, None, :])


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds | None = None,
    kept: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """[B, A, S, D] in float64; ``kept`` [B, A, S, S] is True for weights that dropout keeps."""
    repeats = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(heads.double().repeat_interleave(repeats, 1) for heads in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask(query.shape[2], bounds, len(query)), -torch.inf)
    shares = scores.softmax(-1)
    if kept is not None:
        shares = shares * kept / (1 - dropout)
    return shares @ value


def heads(
    batch: int, number: int, groups: int, length: int, width: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value in a projection's memory layout, and an output gradient.

    The memory layout is [S, B, heads, D].
    """
    generator = seeded_generator("cpu", "attention", seed)
    shapes = [(length, batch, count, width) for count in (number, groups, groups, number)]
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
