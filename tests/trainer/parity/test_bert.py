"""BERT in parallel layouts: loss, gradients and steps equal the serial run. About 20 s on one core."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from tests.trainer.families.proofs import record_layout
from tests.trainer.parity.layout_parity import Mutation, compare, problems
from tests.trainer.parity.parity_case import Case
from tests.trainer.spawn import Ranks
from trainer.families.bert import BERT, MEGATRON_BERT
from trainer.model.attention import self_attention
from trainer.model.head import BertHead

CASES = [
    Case("bert", tp=2, micro_batches=2),
    Case("bert", pp=2, micro_batches=2, recompute="uniform"),
    Case("bert", tp=2, pp=2, micro_batches=2, schedule="zb-h1"),
    Case("bert", dp=2, zero=1, micro_batches=2, recompute="modules"),
    Case("bert", tp=2, dp=2, zero=3, micro_batches=2, recompute="block"),
    Case("megatron-bert", tp=2, pp=2, micro_batches=2, schedule="interleaved"),
    Case("megatron-bert", dp=2, zero=2, micro_batches=2),
    Case("masked-only", tp=2, pp=2, micro_batches=2, recompute="core"),
    Case("bert", tp=2, micro_batches=2, recompute="loss"),
    # Without the binary head: the gradient of its bias is a sum of four samples, which cancel down to rounding.
    Case("masked-only", tp=2, micro_batches=2, precision="bf16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_gradients_and_steps_equal_the_serial_run(ranks: Ranks, serials: dict[Any, Any], case: Case) -> None:
    found = compare(ranks, serials, case)
    assert not problems(case, found), str(found)
    record_layout((MEGATRON_BERT if case.model == "megatron-bert" else BERT).name, case)


def padding_seen() -> AbstractContextManager[object]:
    """Attention of parallel layouts sees the padding."""
    attend = self_attention.attend

    def without_mask(*arguments: Any, key_mask: torch.Tensor | None, **options: Any) -> torch.Tensor:
        del key_mask
        return attend(*arguments, **options)

    return mock.patch.object(self_attention, "attend", without_mask)


def order_counted_twice() -> AbstractContextManager[object]:
    """Each tp rank adds its own copy of the samples' loss."""
    forward = BertHead.forward

    def doubled(head: BertHead, *arguments: Any) -> torch.Tensor:
        return forward(head, *arguments) * torch.tensor([1.0, 2.0])

    return mock.patch.object(BertHead, "forward", doubled)


@pytest.mark.parametrize("fault", [padding_seen, order_counted_twice])
def test_a_fault_is_found(ranks: Ranks, serials: dict[Any, Any], fault: Mutation) -> None:
    with pytest.raises(AssertionError):
        assert not problems(CASES[0], compare(ranks, serials, CASES[0], fault))
