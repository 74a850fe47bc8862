"""T5 in parallel layouts: loss, gradients and steps equal the serial run. About 25 s on one core."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch

from tests.trainer.families.proofs import record_layout
from tests.trainer.parity.layout_parity import compare, problems
from tests.trainer.parity.parity_case import Case
from trainer.model.encoder_decoder import model
from trainer.model.encoder_decoder.relative_bias import RelativeBias

CASES = [
    Case("t5", tp=2, micro_batches=2),
    Case("t5", tp=4, sp=True, micro_batches=2, recompute="block"),
    Case("t5", dp=2, zero=1, micro_batches=2, recompute="uniform"),
    Case("t5", tp=2, dp=2, zero=1, micro_batches=2, recompute="modules"),
    Case("t5-tied", tp=2, dp=2, micro_batches=2, overlap=False, recompute="core"),
    Case("t5", tp=2, sp=True, micro_batches=2, precision="bf16"),
]
# Models that no family describes.
MEGATRON_CASES = [
    Case("megatron-t5", tp=2, micro_batches=2),
    Case("megatron-t5", tp=4, sp=True, micro_batches=2, recompute="block"),
    Case("megatron-t5", tp=2, dp=2, zero=1, micro_batches=2, recompute="modules"),
    Case("t5-rope", tp=2, sp=True, dp=2, micro_batches=2, recompute="uniform"),
    Case("megatron-t5", tp=2, sp=True, micro_batches=2, recompute="loss"),
]


@pytest.mark.parametrize("case", MEGATRON_CASES, ids=str)
def test_megatrons_models_equal_the_serial_run(ranks, serials, case) -> None:
    found = compare(ranks, serials, case)
    assert not problems(case, found), str(found)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_gradients_and_steps_equal_the_serial_run(ranks, serials, case) -> None:
    found = compare(ranks, serials, case)
    assert not problems(case, found), str(found)
    record_layout("T5", case)


def encoder_gradient_sum_dropped() -> AbstractContextManager[object]:
    """Each rank trains the encoder by the gradient of its own heads of the decoder."""
    return mock.patch.object(model, "enter_parallel_region", lambda inputs, _: inputs)


def biases_of_other_heads() -> AbstractContextManager[object]:
    """Each tp rank adds the position biases of its heads in the wrong order."""
    forward = RelativeBias.forward

    def turned(bias: RelativeBias, queries: int, keys: int) -> torch.Tensor:
        found = forward(bias, queries, keys)
        return found if len(found) == 8 else found.flip(0)

    return mock.patch.object(RelativeBias, "forward", turned)


@pytest.mark.parametrize("fault", [encoder_gradient_sum_dropped, biases_of_other_heads])
def test_a_fault_is_found(ranks, serials, fault) -> None:
    with pytest.raises(AssertionError):
        assert not problems(CASES[0], compare(ranks, serials, CASES[0], fault))
