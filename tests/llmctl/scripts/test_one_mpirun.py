"""What all processes of one mpirun know of it, with the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
from trainer.data.prepare.attempt_name import attempt_of_start
print(attempt_of_start(os.environ, 2))
"""


@pytest.mark.programs("mpirun")
def test_one_mpirun_is_one_start() -> None:
    program = (
        "import os; from trainer.data.prepare.attempt_name import attempt_of_start as name; print(name(os.environ, 2))"
    )
    command = ["mpirun", "--oversubscribe", "-np", "2", sys.executable, "-c", program]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **allowed, "PYTHONPATH": str(Path(__file__).parents[3])}
    names = [
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout.split()
        for _ in range(2)
    ]
    assert [len(set(found)) for found in names] == [1, 1] and [len(found) for found in names] == [2, 2]
    assert names[0][0] != names[1][0] and names[0][0].startswith("mpirun-")
