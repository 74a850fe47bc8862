"""Decoders of every family train in parallel layouts as on one rank; ``make parity PARITY=--families`` has them all.

Without ``--proofs`` a family without experts has one of the two layouts.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.families.proofs import record_layout, rows_of_page
from tests.trainer.parity.layout_parity import compare, problems
from tests.trainer.parity.parity_case import FAMILY_MODELS, Case
from tests.trainer.spawn import Ranks
from trainer.families.catalogue import FAMILIES

# Every axis, and what divides a layer in another way: the sequence over tp ranks, experts and weights over replicas.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "pp": 2, "sp": True, "recompute": "uniform", "micro_batches": 2},
    {"cp": 2, "dp": 2, "zero": 3, "recompute": "core", "micro_batches": 2},
)
CASES = [
    pytest.param(
        Case(name, **layout, ep=2 if "dp" in layout and shape.get("num_experts") else 1),
        # Families of one shape divide it in the same way: alternately, one of their layouts is left to the proofs.
        marks=[] if (family + number) % 2 == 0 or shape.get("num_experts") else pytest.mark.proof,
    )
    for family, (name, shape) in enumerate(FAMILY_MODELS.items())
    for number, layout in enumerate(LAYOUTS)
]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def serials() -> dict[Any, Any]:
    """Cache of serial outcomes."""
    return {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_gradients_and_steps_equal_the_serial_run(ranks: Ranks, serials: dict[Any, Any], case: Case) -> None:
    found = compare(ranks, serials, case)
    assert not problems(case, found), str(found)
    record_layout(case.model, case)


def test_the_page_has_every_family() -> None:
    assert rows_of_page() == [family.name for family in FAMILIES]
