"""Sizes of the measurements, and the work of each. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
BACKWARD = 2.0
"""Operations of attention's backward by those of its forward: gradients of both operands of both products. A kernel
that computes the scores again does more, which counts as time only."""


@dataclass(frozen=True)
class Sizes:
    """Sizes for one kind of device.

    Attributes:
        products: m, n and k of each.
        attentions: batch, heads, tokens and width of a head of each.
        copy: bytes of the buffer.
        launches: operations started in a row.
        messages: bytes of the messages.
        seconds: time for the repetitions of one measurement.
    """

    products: tuple[tuple[int, int, int], ...]
    attentions: tuple[tuple[int, int, int, int], ...]
    copy: int
    launches: int
    messages: tuple[int, ...]
    seconds: float


def _of_layer(tokens: int, hidden: int) -> tuple[tuple[int, int, int], ...]:
    """Products of a transformer layer: output projection, query, key and value, both parts of the feed-forward."""
    return (
        (tokens, hidden, hidden),
        (tokens, 3 * hidden, hidden),
        (tokens, 4 * hidden, hidden),
        (tokens, hidden, 4 * hidden),
    )


GPU = Sizes(
    products=(
        *(shape for hidden in (512, 1024, 2048, 4096) for shape in _of_layer(4096, hidden)),
        # A part of tensor parallelism, few tokens, logits, and the gradient of a weight, which sums over the tokens.
        (4096, 1024, 8192),
        (4096, 8192, 8192),
        (1024, 4096, 4096),
        (16384, 4096, 4096),
        (4096, 50304, 4096),
        (16384, 4096, 2048),
    ),
    attentions=((4, 16, 2048, 64), (4, 16, 2048, 128), (1, 32, 4096, 64), (1, 32, 4096, 128), (1, 32, 8192, 128)),
    copy=1024 * MIB,
    launches=2000,
    messages=(KIB, 64 * KIB, MIB, 16 * MIB, 128 * MIB),
    seconds=0.2,
)
CPU = Sizes(
    products=(*_of_layer(256, 512), (256, 1024, 1024)),
    attentions=((1, 4, 256, 64), (1, 4, 256, 128)),
    copy=32 * MIB,
    launches=1000,
    messages=(KIB, 64 * KIB, MIB, 4 * MIB),
    seconds=0.2,
)


def product_work(shape: tuple[int, int, int]) -> float:
    """Operations of a product."""
    m, n, k = shape
    return 2.0 * m * n * k


def attention_work(shape: tuple[int, int, int, int]) -> float:
    """Operations of causal attention's forward: half of two products of tokens x tokens x width."""
    batch, heads, tokens, width = shape
    return 2.0 * batch * heads * tokens * tokens * width


def bus_bytes(what: str, size: int, ranks: int) -> float:
    """Bytes over the bus of each rank.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. They compare with a link's speed,
    whatever the number of ranks.
    """
    part = (ranks - 1) / ranks
    factors: Mapping[str, float] = {"all-reduce": 2 * part, "all-gather": part, "reduce-scatter": part, "send": 1.0}
    return factors[what] * size
