"""Saves under system calls that fail: each call once. ``make torture`` tries every number of each with every error."""

import itertools
import os
from collections import Counter

import pytest

from tests.save_faults.attached import lack_of_strace
from tests.save_faults.broken_saves import BrokenSaves

pytestmark = pytest.mark.programs("strace")
WAYS = {"between steps": False, "beside steps": True}


def sample(faults, turn):
    """One case of every second call: the rarest error, and the last number, at which most has happened."""
    groups = [list(group) for _, group in itertools.groupby(sorted(faults), key=lambda fault: fault.call)]
    found, used = [], Counter()
    for cases in groups[turn::2]:
        error = min(sorted({fault.error for fault in cases}), key=lambda error: used[error])
        used[error] += 1
        found.append(next(fault for fault in reversed(cases) if fault.error == error))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_from_a_verified_checkpoint_whatever_call_of_a_save_fails(request, tmp_path, way):
    is_required = request.config.getoption("--require-real") and os.geteuid() == 0
    lack = None if is_required else lack_of_strace()
    if lack is not None:
        pytest.skip(lack)
    saves = BrokenSaves(tmp_path / "saves", WAYS[way])
    cases = sample(saves.faults(), list(WAYS).index(way))
    assert {fault.error for fault in cases} == {"EIO", "ENOSPC", "SIGKILL"}
    for fault in cases:
        saves.try_fault(fault)
