"""The covering array can fail: its cases catch every fault of tests.trainer.parity.mutations."""

import functools

import pytest

from tests.trainer.parity.covering_array import EXPERTS_OVER_TP, case_of, committed
from tests.trainer.parity.deviation import excesses
from tests.trainer.parity.layout_parity import compare, problems
from tests.trainer.parity.mutations import FAULTS
from tests.trainer.spawn import RankError

RANKS = 8

# On another processor a fault that is barely above a limit would be below.
MARGIN = 100.0
CASES = sorted((case_of(row) for row in committed()), key=lambda case: (case.world_size, case.micro_batches))
CASES += EXPERTS_OVER_TP


def test_there_are_at_least_twelve_faults():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 12


@pytest.fixture(scope="module")
def unbroken(ranks, serials):
    """Problems of a case without a fault, cached because several faults share a case."""
    return functools.cache(lambda case: problems(case, compare(ranks, serials, case)))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_broken_trainer_is_caught(ranks, serials, unbroken, fault):
    case = next(case for case in CASES if fault.meets(case))
    assert not unbroken(case), "the case fails by itself"
    try:
        found = compare(ranks, serials, case, fault.enter)
    except RankError as error:
        raise AssertionError(f"{fault} crashed instead of giving wrong numbers") from error
    except AssertionError:
        return  # copies that differ, or elements that are missing
    assert max(excesses(case, found).values()) >= MARGIN, f"{case} hardly notices {fault}: {found}"
