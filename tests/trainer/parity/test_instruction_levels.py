"""Parity on every processor: few cases at every instruction level below the best."""

import subprocess

import pytest

from tests.trainer.parity.instruction_levels import LEVELS, command_at, offered


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_every_layout_computes_the_same(level):
    if level not in offered():
        pytest.skip(f"this processor lacks the instruction level {level}; its best is {offered()[-1]}")
    if level is offered()[-1] and level is not LEVELS[0]:
        pytest.skip(
            f"the instruction level {level} is this processor's best, that of test_parity and its native kernels"
        )
    command, environment = command_at(level, ["--few"])
    ended = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert f"instruction sets: torch {level.torch}, native kernels {level.kernels}\n" in ended.stdout
