"""Rotary position embedding of packed heads: in-place forward, and backward."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.trainer.ops.cuda.cuda_emulation.emulation import EmulatedCuda
from tests.trainer.ops.op_checks import (
    call,
    check_against_oracle,
    check_gradients,
    check_same_bits,
    check_threads,
    drawn,
    in_float64,
    run,
    sparse_tensor,
)
from trainer.ops.rotary import ROPE

pytestmark = pytest.mark.usefixtures("kernel_library")

# Sequence, batch, query groups, queries per group, head width, rotated channels, positions per sample.
SHAPES = (
    (1, 1, 1, 1, 2, 2, False),
    (5, 2, 3, 1, 16, 16, False),
    (5, 2, 3, 2, 16, 16, True),
    (7, 3, 1, 4, 123, 46, True),
    (3, 2, 2, 1, 123, 122, False),
    (2, 1, 1, 2, 8191, 8190, False),
    (0, 2, 2, 2, 8, 8, False),
)


def angles(
    length: int, batch: int, rotated: int, by_sample: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    turns = drawn((length, batch if by_sample else 1, 1, 1, rotated // 2), torch.float64, seed=1) * 3
    return turns.cos().to(dtype), turns.sin().to(dtype)


def arguments(shape: tuple[Any, ...], dtype: torch.dtype, *, is_turned: bool = True, interleaved: bool = False) -> Any:
    length, batch, groups, queries, head_dim, rotated, by_sample = shape
    packed = drawn((length, batch, groups * (queries + 2) * head_dim), dtype).requires_grad_()
    cos, sin = angles(length, batch, rotated, by_sample, dtype) if is_turned else (None, None)
    return packed, queries, head_dim, cos, sin, interleaved


def rotate_half(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate heads [S, B, heads, D] as Hugging Face's Llama, or as GPT-J if ``interleaved``."""
    cos, sin = cos.squeeze(2), sin.squeeze(2)
    cos, sin = (
        table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1) for table in (cos, sin)
    )
    rotated = cos.shape[-1]

    def turn(heads: torch.Tensor) -> torch.Tensor:
        turned, rest = heads[..., :rotated], heads[..., rotated:]
        if interleaved:
            other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        else:
            first, second = turned.chunk(2, -1)
            other = torch.cat((-second, first), -1)
        return torch.cat((turned * cos + other * sin, rest), -1)

    return turn(query), turn(key)


def formula(
    packed: torch.Tensor,
    queries: int,
    head_dim: int,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The definition in torch operations, with autograd's gradient."""
    heads = packed.unflatten(-1, (-1, queries + 2, head_dim))
    query, key, value = heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
    if cos is not None and sin is not None:
        query, key = rotate_half(query, key, cos, sin, interleaved)
    return tuple(part.permute(1, 2, 0, 3) for part in (query, key, value))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_those_of_rounding_in_every_shape(
    shape: tuple[Any, ...], interleaved: bool, dtype: torch.dtype
) -> None:
    given = arguments(shape, dtype, interleaved=interleaved)
    check_against_oracle(ROPE, "native", given, oracle=formula, consumes=True)


@pytest.mark.cpu_only
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_torch_is_right(shape: tuple[Any, ...], interleaved: bool) -> None:
    given = arguments(shape, torch.float64, interleaved=interleaved)
    found, gradients, _ = run(ROPE.implementations["reference"].function, given)
    right, *_ = run(formula, given, gradients=gradients)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-13)


@pytest.mark.cpu_only
@pytest.mark.usefixtures("level")
def test_instruction_sets(dtype: torch.dtype) -> None:
    for interleaved in (False, True):
        given = arguments((5, 2, 3, 2, 128, 64, True), dtype, interleaved=interleaved)
        check_against_oracle(ROPE, "native", given, consumes=True)


@pytest.mark.parametrize("queries", [1, 3])
def test_errors_are_those_of_rounding_without_rotation(queries: int) -> None:
    check_against_oracle(ROPE, "native", arguments((4, 2, 3, queries, 9, 0, False), torch.float32, is_turned=False))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 2, 1, 5, 4, True), (2, 1, 1, 2, 4, 4, False)])
def test_gradients_are_those_of_finite_differences(shape: tuple[Any, ...], interleaved: bool) -> None:
    check_gradients(ROPE.implementations["native"].function, arguments(shape, torch.float64, interleaved=interleaved))


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    check_threads(ROPE.implementations["native"].function, arguments((257, 2, 4, 2, 64, 64, False), dtype))


def test_one_query_per_group_is_rotated_in_place() -> None:
    packed, *rest = arguments(SHAPES[1], torch.float32)
    memory = packed.detach()
    heads = ROPE.implementations["native"].function(memory, *rest)
    assert {part.untyped_storage().data_ptr() for part in heads} == {memory.untyped_storage().data_ptr()}


def test_queries_of_shared_groups_are_copied_once() -> None:
    packed, *rest = arguments(SHAPES[2], torch.float32)
    query, key, value = ROPE.implementations["native"].function(packed.detach(), *rest)
    assert query.permute(2, 0, 1, 3).is_contiguous()
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


def test_sixteen_bit_is_rounded_once() -> None:
    packed, *rest = arguments((6, 2, 3, 2, 21, 18, True), torch.bfloat16)
    right = formula(*in_float64((packed.detach(), *rest)))
    for found, exact in zip(ROPE.implementations["native"].function(packed.detach(), *rest), right, strict=True):
        # Error of rounding to nearest, without double rounding through float32.
        assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 * (1 + 2.0**-12) + 1e-6).all()


class _Heads(ctypes.Structure):
    """llmctl_heads in csrc/rotary/call.h."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("source_strides", ctypes.c_longlong * 4),
        ("target_strides", ctypes.c_longlong * 4),
        ("groups", ctypes.c_longlong),
        ("heads", ctypes.c_longlong),
        ("is_turned", ctypes.c_int),
    )


class _Angles(ctypes.Structure):
    """llmctl_angles in csrc/rotary/call.h."""

    _fields_ = (
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("cos_strides", ctypes.c_longlong * 2),
        ("sin_strides", ctypes.c_longlong * 2),
        ("rotated", ctypes.c_longlong),
        ("is_interleaved", ctypes.c_int),
        ("is_inverse", ctypes.c_int),
    )


LENGTH, GROUPS, HEAD_DIM = 70_000, 256, 128


def many_tokens() -> tuple[torch.Tensor, torch.Tensor, _Heads, _Angles, list[torch.Tensor]]:
    """Heads beyond 2^31 elements with a nonzero last token, expected values, and arguments."""
    heads = sparse_tensor((LENGTH, 1, GROUPS, 1, HEAD_DIM), torch.bfloat16)
    tables = [sparse_tensor((LENGTH, 1, HEAD_DIM // 2), torch.bfloat16) for _ in range(2)]
    heads[-1] = drawn(heads.shape[1:], torch.bfloat16)
    for table in tables:
        table[-1] = drawn(table.shape[1:], torch.bfloat16, seed=1)
    cos, sin = (table[-1:].clone().unsqueeze(2) for table in tables)
    last = heads[-1:, :, :, 0].clone()
    expected, _ = rotate_half(last.double(), last.double(), cos.double(), sin.double(), False)
    strides = heads.stride()[:4]
    part = _Heads(heads.data_ptr(), heads.data_ptr(), strides, strides, GROUPS, 1, 1)
    turn = _Angles(*(table.data_ptr() for table in tables), *(table.stride()[:2] for table in tables), HEAD_DIM, 0, 0)
    return heads, expected, part, turn, tables


def check_last_token(heads: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(heads[-1:, :, :, 0], expected.bfloat16(), rtol=2.0**-7, atol=1e-6)
    assert not heads[:2].any()
    assert not heads[LENGTH - 2].any()


@pytest.mark.cpu_only
def test_tokens_beyond_two_to_the_31_elements() -> None:
    heads, expected, part, turn, _ = many_tokens()
    spans = (LENGTH - 1, LENGTH, 1)
    call("llmctl_cpu_rope", torch.bfloat16, ctypes.byref(part), 1, ctypes.byref(turn), 1, HEAD_DIM, *spans)
    check_last_token(heads, expected)


@pytest.mark.cpu_only
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated", "before"), [(21, 18, 1), (64, 64, 0), (192, 128, 0), (600, 18, 1)])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("is_by_head", [False, True])
def test_storing_past_the_caches_changes_nothing(
    is_by_head: bool, batch: int, head_dim: int, rotated: int, before: int, is_interleaved: bool, dtype: torch.dtype
) -> None:
    """Heads of a token, or tokens of a head, are contiguous in memory.

    13 and 26 are not multiples of the vector width. Heads begin at a cache line, or ``before`` elements after it.
    """
    heads, (cos, sin) = drawn((13, batch, 2, 2, head_dim), dtype), angles(13, batch, rotated, True, dtype)
    if is_by_head:
        heads = heads.permute(1, 2, 3, 0, 4).contiguous().permute(3, 0, 1, 2, 4)
    turn = _Angles(cos.data_ptr(), sin.data_ptr(), cos.stride()[:2], sin.stride()[:2], rotated, is_interleaved, 0)
    outcomes = []
    for past_caches in (0, 1):
        memory = torch.full((2 * heads.numel() + before,), torch.nan, dtype=dtype)[before:]
        memory = memory.view(*heads.shape[:3], 4, head_dim)
        # Rotated channels, then channels that are only copied; the last tensor stays in place.
        targets, parts = (memory[..., :2, :], memory[..., 2:, :]), (_Heads * 3)()
        for number, target in enumerate(targets):
            where = (heads.data_ptr(), target.data_ptr(), heads.stride()[:4], target.stride()[:4])
            parts[number] = _Heads(*where, 2, 2, 1 - number)
        kept = heads.clone()
        parts[2] = _Heads(kept.data_ptr(), kept.data_ptr(), kept.stride()[:4], kept.stride()[:4], 2, 2, 1)
        spans = (0, 13 * batch, past_caches)
        call("llmctl_cpu_rope", dtype, parts, 3, ctypes.byref(turn), batch, head_dim, *spans)
        check_same_bits([kept], [targets[0]])
        outcomes.append([memory])
    check_same_bits(*outcomes)
    check_same_bits([targets[1]], [heads])


@pytest.mark.cpu_only
def test_cuda_tokens_beyond_two_to_the_31_elements(emulated_cuda: EmulatedCuda) -> None:
    heads, expected, part, turn, _ = many_tokens()
    with emulated_cuda.last_blocks(1):
        emulated_cuda.call(
            "llmctl_cuda_rope",
            *(torch.bfloat16, ctypes.byref(part), 1, ctypes.byref(turn), LENGTH, 1, HEAD_DIM),
        )
    check_last_token(heads, expected)


def test_mismatched_arguments_are_refused() -> None:
    cos, sin = angles(6, 2, 18, True, torch.float32)
    for table, message in (
        ((cos, None), "cos and sin come together"),
        ((cos[:-1], sin[:-1]), "is not .sequence, batch or 1"),
        ((cos.double(), sin.double()), "another dtype"),
        ((cos.repeat(1, 1, 1, 1, 2), sin.repeat(1, 1, 1, 1, 2)), "angles for 36 channels, heads have 21"),
    ):
        heads = drawn((6, 2, 3, 4, 21), torch.float32)
        with pytest.raises(RuntimeError, match=message):
            torch.ops.llmctl.rope_take_queries_(heads, *table, False)
    expanded = drawn((6, 1, 3, 4, 21), torch.float32).expand(6, 2, 3, 4, 21)
    for op in (torch.ops.llmctl.rope_take_queries_, torch.ops.llmctl.rope_):
        with pytest.raises(RuntimeError, match="packed was expanded"):
            op(expanded, cos, sin, False)
