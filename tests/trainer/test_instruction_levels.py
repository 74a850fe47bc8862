"""Parity does not hang on the processor: few cases at every instruction level that it has."""

import subprocess

import pytest

from tests.trainer.instruction_levels import LEVELS, command_at, lack_of


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_every_layout_computes_the_same(level):
    if lack := lack_of(level):
        ran = ", ".join(str(other) for other in LEVELS if lack_of(other) is None)
        pytest.skip(f"instruction level {level}: {lack}; parity was proved on {ran}")
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
    assert f"instruction sets: torch {level.torch}, own kernels {level.kernels}\n" in ended.stdout
