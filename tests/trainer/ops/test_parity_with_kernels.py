"""Parallel training on native kernels equals serial training on torch's operations, for every model."""

from __future__ import annotations

from functools import partial

import pytest

from tests.trainer.parity.layout_parity import compare, problems
from tests.trainer.parity.native_kernels import on_native_kernels
from tests.trainer.parity.parity_case import Case
from tests.trainer.spawn import Ranks
from trainer.ops.dispatch.library import Library

CASES = [
    Case("llama"),
    Case("gpt2"),
    Case("mixtral"),
    Case("llama", tp=2, sp=True, recompute="modules"),
    Case("llama", pp=2, schedule="zb-h1"),
    Case("qwen", tp=2, pp=2, recompute="uniform"),
    Case("llama", cp=2, zero=3),
    Case("gpt2", tp=2, sp=True, cp=2, zero=1),
    Case("gpt2", dp=2, zero=2),
    Case("mixtral", dp=2, ep=2, zero=1, recompute="moe-act"),
    Case("mixtral", tp=2, cp=2, ep=2),
]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def serials():
    """Serial results with torch's operations, computed once per case."""
    return {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_gradients_and_steps_equal_the_serial_run(ranks, serials, kernel_library: Library, case):
    found = compare(ranks, serials, case, partial(on_native_kernels, kernel_library.path))
    assert not problems(case, found, same_operations=False), str(found)
