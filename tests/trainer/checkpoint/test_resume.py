"""Killed and resumed runs end with the same bits, with one seed per layout.

tests.resume_torture tests more seeds.
"""

import pytest

from tests.resume_torture import VARIANTS, Torture


@pytest.fixture(scope="module")
def torture(tmp_path_factory):
    return Torture(tmp_path_factory.mktemp("torture"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(len(VARIANTS)), ids=list(VARIANTS))
def test_killed_and_resumed_is_equal_bit_for_bit(torture, seed):
    torture.run_seed(seed)
