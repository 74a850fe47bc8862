"""All parallel layouts compute the same: the cases of the committed covering array.

``make parity`` runs the matrix in full. tests.trainer.parity.test_mutations shows that these cases can fail.
"""

import itertools
import random

import pytest

from tests.parity import rows as rows_in_full
from tests.trainer.parity.balanced_models import BALANCED
from tests.trainer.parity.covering_array import (
    CHUNKED_LOSS,
    EXPERTS_OVER_TP,
    FACTORS,
    FURTHER_TOKENS,
    MAX_ROWS,
    SIXTEEN_BIT,
    WIDER_MESHES,
    case_of,
    committed,
    is_allowed,
    meeting_pairs,
    pairs_of,
    refusal,
)
from tests.trainer.parity.layout_parity import compare, keeps_order, problems
from tests.trainer.parity.parity_case import Case

RANKS = 8

ROWS = committed()
CASES = [case_of(row) for row in ROWS]


@pytest.mark.parametrize("case", [*CASES, *FURTHER_TOKENS, *CHUNKED_LOSS, *EXPERTS_OVER_TP], ids=str)
def test_loss_gradients_and_steps_equal_the_serial_run(ranks, serials, case):
    found = compare(ranks, serials, case)
    assert not problems(case, found), str(found)


@pytest.mark.parametrize("model", BALANCED)
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "sp": True, "recompute": "moe"},
        {"dp": 2, "ep": 2, "zero": 1},
        {"cp": 2, "tp": 2, "sp": True},
        {"pp": 2, "cp": 2, "cp_comm": "a2a"},
    ],
    ids=str,
)
def test_every_layout_balances_the_load_alike(ranks, serials, model, layout):
    case = Case(model, **layout)
    found = compare(ranks, serials, case)
    assert not problems(case, found), str(found)


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, pp=2, dp=2, sp=True, zero=1, order="tp-cp-ep-pp-dp"),
        Case("mixtral", pp=2, cp=2, dp=2, ep=4, zero=3, order="tp-cp-ep-pp-dp"),
    ],
    ids=str,
)
def test_the_order_of_the_ranks_changes_no_result(ranks, serials, case):
    found = compare(ranks, serials, case)
    assert not problems(case, found), str(found)


@pytest.mark.parametrize("case", SIXTEEN_BIT, ids=str)
def test_16_bit_training_stays_within_its_bounds(ranks, serials, case):
    found = compare(ranks, serials, case)
    assert not problems(case, found), str(found)


def test_the_array_is_small_and_allowed_and_has_every_possible_pair():
    assert len(ROWS) <= MAX_ROWS
    assert all(is_allowed(row) for row in ROWS)
    assert len({tuple(row.items()) for row in ROWS}) == len(ROWS)
    missing = meeting_pairs() - {pair for row in ROWS for pair in pairs_of(row)}
    assert not missing
    # Mostly 2 to 4 ranks, but with every two and every three axes together.
    assert sum(case.world_size <= 4 for case in CASES) >= 0.75 * len(CASES)
    axes = ("tp", "pp", "cp", "dp")
    for together in (*itertools.combinations(axes, 2), *itertools.combinations(axes, 3)):
        assert any(all(getattr(case, axis) > 1 for axis in together) for case in CASES), together


@pytest.mark.proof
def test_the_full_matrix_has_every_pair_of_choices():
    """Drawn factors must not follow the other factors, which could hide a fault."""
    rows = list(rows_in_full())
    cases = [case_of(row) for row in rows]
    assert len(set(cases)) == len(cases)
    assert not [refused for case in random.Random(3).sample(cases, 200) if (refused := refusal(case))]
    missing = meeting_pairs() - {pair for row in rows for pair in pairs_of(row)}
    assert not missing
    # Only with more micro-batches than stages are all of them at work at once.
    assert {case.schedule for case in cases if case.pp == 4 and case.micro_batches > 4} == set(FACTORS["schedule"])
    for mesh in WIDER_MESHES:
        assert any(all(getattr(case, axis) == size for axis, size in mesh.items()) for case in cases), mesh


def test_random_rows_have_no_other_allowed_pairs():
    chance = random.Random(5)
    known = meeting_pairs()
    rows = [{name: chance.choice(values) for name, values in FACTORS.items()} for _ in range(40_000)]
    allowed = [row for row in rows if is_allowed(row)]
    assert len(allowed) > 100
    assert {pair for row in allowed for pair in pairs_of(row)} <= known


def test_no_choice_is_left_out():
    for name, values in FACTORS.items():
        assert {row[name] for row in ROWS} == set(values), name
    assert any(keeps_order(case) and case.pp > 1 for case in CASES), "no case is held to the same bits"
