"""Parallel training on native kernels equals serial training in torch for all models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from tests.trainer.parity import layout_parity
from tests.trainer.parity.layout_parity import compare, problems
from tests.trainer.parity.parity_case import Case
from tests.trainer.spawn import Ranks
from trainer.ops.dispatch.library import Library, load_library
from trainer.ops.dispatch.registry import OPERATIONS, Kernels
from trainer.parallel_model import build_model

CASES = [
    Case("llama"),
    Case("gpt2-hidden-dropout"),
    Case("mixtral"),
    Case("llama", tp=2, sp=True, recompute="modules"),
    Case("llama", pp=2, schedule="zb-h1"),
    Case("qwen", tp=2, pp=2, recompute="uniform"),
    Case("llama", cp=2, zero=3),
    Case("gpt2-hidden-dropout", tp=2, sp=True, cp=2, zero=1),
    Case("gpt2", dp=2, zero=2),
    Case("mixtral", dp=2, ep=2, zero=1, recompute="moe-act"),
    Case("mixtral", tp=2, cp=2, ep=2),
]


@contextmanager
def on_own_kernels(library: Path) -> Iterator[None]:
    """Run all operations on the library for all sizes of tensors."""
    load_library(library)
    own = Kernels(**{operation.name: operation.implementations["native"].function for operation in OPERATIONS})
    with mock.patch.object(layout_parity, "build_model", partial(build_model, kernels=own)):
        yield


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
    found = compare(ranks, serials, case, partial(on_own_kernels, kernel_library.path))
    # Different kernels round differently, so results are not bit-identical.
    wrong = [problem for problem in problems(case, found) if "bit" not in problem]
    assert not wrong, str(found)
