"""Rotary position embedding in Triton: the operation of trainer.kernels.rotary, where there is something to turn.

Legend: S sequence, B micro-batch, G query groups, R queries per group, A = G*R, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from trainer.kernels.triton.tiling import Tile, device_of, in_triton, power_of_two

_ELEMENTS = 1024
"""Pairs of channels that a program holds at a time, of as many heads as there are of a group."""


@triton.jit
def _turned(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _angles(
    cos: tl.tensor,
    sin: tl.tensor,
    time: tl.tensor,
    sample: tl.tensor,
    cos_strides: tl.tuple,
    sin_strides: tl.tuple,
    pair: tl.tensor,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Of one token, for each pair."""
    of_cos = cos + time * cos_strides[0] + sample * cos_strides[1]
    of_sin = sin + time * sin_strides[0] + sample * sin_strides[1]
    is_pair = pair < HALF
    return (
        tl.load(of_cos + pair, mask=is_pair, other=0.0).to(WIDE),
        tl.load(of_sin + pair, mask=is_pair, other=0.0).to(WIDE),
    )


@triton.jit
def _split(
    packed: tl.tensor,
    query: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    batch: tl.tensor,
    groups: tl.tensor,
    queries: tl.tensor,
    packed_strides: tl.tuple,
    cos_strides: tl.tuple,
    sin_strides: tl.tuple,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPIES: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Of one token and group: queries and key turned, in place but for queries that go to ``query`` if COPIES."""
    program = tl.program_id(0).to(tl.int64)
    token, group = program // groups, program % groups
    time, sample = token // batch, token % batch
    source = packed + time * packed_strides[0] + sample * packed_strides[1] + group * (queries + 2) * HEAD_DIM
    target = query + program * queries * HEAD_DIM
    pair = tl.arange(0, PAIRS)[None, :]
    turn_cos, turn_sin = _angles(cos, sin, time, sample, cos_strides, sin_strides, pair, HALF, WIDE)
    for start in range(0, queries + 1, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        first = head * HEAD_DIM + pair
        second = first + HALF
        if INTERLEAVED:
            first += pair
            second = first + 1
        inside = (head <= queries) & (pair < HALF)
        one = tl.load(source + first, mask=inside, other=0.0)
        other = tl.load(source + second, mask=inside, other=0.0)
        turned, turned_other = _turned(one.to(WIDE), other.to(WIDE), turn_cos, turn_sin)
        turned, turned_other = turned.to(one.dtype), turned_other.to(one.dtype)
        if COPIES:
            is_query = inside & (head < queries)
            tl.store(target + first, turned, mask=is_query)
            tl.store(target + second, turned_other, mask=is_query)
            inside = inside & (head == queries)
        tl.store(source + first, turned, mask=inside)
        tl.store(source + second, turned_other, mask=inside)
        if COPIES and 2 * HALF < HEAD_DIM:
            channel = 2 * HALF + tl.arange(0, REST)[None, :]
            is_rest = (head < queries) & (channel < HEAD_DIM)
            rest = tl.load(source + head * HEAD_DIM + channel, mask=is_rest)
            tl.store(target + head * HEAD_DIM + channel, rest, mask=is_rest)


@triton.jit
def _of_three(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    head: tl.tensor,
    stride: tl.tensor,
    queries: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Channels of heads of a group: its queries, then its key, then its value."""
    of_query = tl.load(query + head * stride + channel, mask=inside & (head < queries), other=0.0).to(WIDE)
    of_key = tl.load(key + channel, mask=inside & (head == queries), other=0.0).to(WIDE)
    of_value = tl.load(value + channel, mask=inside & (head == queries + 1), other=0.0).to(WIDE)
    return of_query + of_key + of_value


@triton.jit
def _join(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    packed: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    batch: tl.tensor,
    groups: tl.tensor,
    queries: tl.tensor,
    query_strides: tl.tuple,
    key_strides: tl.tuple,
    value_strides: tl.tuple,
    cos_strides: tl.tuple,
    sin_strides: tl.tuple,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Of one token and group: the gradient of its heads, of which queries and key are turned back."""
    program = tl.program_id(0).to(tl.int64)
    token, group = program // groups, program % groups
    time, sample = token // batch, token % batch
    of_query = query + sample * query_strides[0] + group * queries * query_strides[1] + time * query_strides[2]
    of_key = key + sample * key_strides[0] + group * key_strides[1] + time * key_strides[2]
    of_value = value + sample * value_strides[0] + group * value_strides[1] + time * value_strides[2]
    target = packed + program * (queries + 2) * HEAD_DIM
    pair = tl.arange(0, PAIRS)[None, :]
    turn_cos, turn_sin = _angles(cos, sin, time, sample, cos_strides, sin_strides, pair, HALF, WIDE)
    for start in range(0, queries + 2, HEADS):
        head = start + tl.arange(0, HEADS)[:, None].to(tl.int64)
        first, second = pair, pair + HALF
        if INTERLEAVED:
            first, second = 2 * pair, 2 * pair + 1
        inside = (head < queries + 2) & (pair < HALF)
        one = _of_three(of_query, of_key, of_value, head, query_strides[1], queries, first, inside, WIDE)
        other = _of_three(of_query, of_key, of_value, head, query_strides[1], queries, second, inside, WIDE)
        turned, turned_other = _turned(one, other, turn_cos, -turn_sin)
        is_value = head == queries + 1
        turned, turned_other = tl.where(is_value, one, turned), tl.where(is_value, other, turned_other)
        tl.store(target + head * HEAD_DIM + first, turned.to(packed.dtype.element_ty), mask=inside)
        tl.store(target + head * HEAD_DIM + second, turned_other.to(packed.dtype.element_ty), mask=inside)
        if 2 * HALF < HEAD_DIM:
            channel = 2 * HALF + tl.arange(0, REST)[None, :]
            is_rest = (head < queries + 2) & (channel < HEAD_DIM)
            rest = _of_three(of_query, of_key, of_value, head, query_strides[1], queries, channel, is_rest, WIDE)
            tl.store(target + head * HEAD_DIM + channel, rest.to(packed.dtype.element_ty), mask=is_rest)


@torch.library.custom_op(
    "llmctl_triton::rope_split",
    mutates_args=("heads", "query"),
    schema="(Tensor(a!) heads, Tensor(b!)? query, Tensor cos, Tensor sin, bool interleaved) -> ()",
)
def _launch_split(
    heads: torch.Tensor, query: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> None:
    if not heads.numel():
        return
    length, batch, groups, count, _ = heads.shape
    with device_of(heads):
        _split[(length * batch * groups,)](
            heads,
            heads if query is None else query,
            cos,
            sin,
            batch,
            groups,
            count - 2,
            heads.stride()[:2],
            _strides(cos),
            _strides(sin),
            COPIES=query is not None,
            **_options(heads, cos, interleaved, count - 1),
        )


def _fake_split(*_: Any) -> None:
    return None


_launch_split.register_fake(_fake_split)


@torch.library.custom_op(
    "llmctl_triton::rope_join",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
)
def _launch_join(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """The gradient [S, B, G, R+2, D] of the heads."""
    packed = _fake_join(query, key)
    if not packed.numel():
        return packed
    length, batch, groups, count, _ = packed.shape
    with device_of(packed):
        _join[(length * batch * groups,)](
            query,
            key,
            value,
            packed,
            cos,
            sin,
            batch,
            groups,
            count - 2,
            query.stride()[:3],
            key.stride()[:3],
            value.stride()[:3],
            _strides(cos),
            _strides(sin),
            **_options(packed, cos, interleaved, count),
        )
    return packed


def _fake_join(query: torch.Tensor, key: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, groups, length, head_dim = key.shape
    return key.new_empty((length, batch, groups, query.shape[1] // groups + 2, head_dim))


_launch_join.register_fake(_fake_join)


def _even(tensor: torch.Tensor) -> torch.Tensor:
    """With channels next to each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(angles: torch.Tensor) -> tuple[int, int]:
    """From token to token and from sample to sample, of [S, 1 or B, 1, 1, rotated/2]."""
    return angles.stride(0), angles.stride(1) if angles.shape[1] > 1 else 0


def _options(heads: torch.Tensor, cos: torch.Tensor, interleaved: bool, num_heads: int) -> dict[str, Any]:
    """What a kernel is compiled for, that works on ``num_heads`` of each group."""
    half, head_dim = cos.shape[-1], heads.shape[-1]
    tile = Tile.of(num_heads, half, elements=_ELEMENTS, widest=power_of_two(half))
    return {
        "HEAD_DIM": head_dim,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "WIDE": in_triton(heads.dtype),
        "HEADS": tile.rows,
        "PAIRS": tile.columns,
        "REST": power_of_two(head_dim - 2 * half),
        "num_warps": tile.warps,
    }


def split_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Queries [S, B, A, D] of heads [S, B, G, R+2, D], which are turned in place with the keys; copied if R > 1."""
    queries = heads.shape[3] - 2
    query = None if queries == 1 else heads.new_empty((*heads.shape[:2], heads.shape[2] * queries, heads.shape[4]))
    _launch_split(heads, query, _even(cos), _even(sin), interleaved)
    return heads[..., 0, :] if query is None else query


def join(*grads_and_angles: Any) -> torch.Tensor:
    """The gradient [S, B, G, R+2, D] of the heads from those of what they became, cosines, sines, and how they pair."""
    *tensors, interleaved = grads_and_angles
    joined: torch.Tensor = _launch_join(*(_even(tensor) for tensor in tensors), interleaved)
    return joined
