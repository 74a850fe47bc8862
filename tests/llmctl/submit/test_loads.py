"""Our modules that a cold dry run of ``llmctl submit`` loads: each costs start-up time."""

import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[3]
MAX_FOR_COMMAND = 52
PROGRAM = """
import sys
from llmctl.cli.main import main
environment = {"HOME": sys.argv[1], "PATH": "/usr/bin:/bin", "LLMCTL_RUNS_ROOT": sys.argv[1] + "/runs"}
code = main(["submit", "--show-script", "--cluster", "slurm", *sys.argv[2:]], environment)
print("\\n".join(sys.modules), file=sys.stderr)
sys.exit(code)
"""


def loaded(home: Path, *arguments: str) -> list[str]:
    """Our modules that a fresh Python has loaded after a dry run."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(home), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash")
    return sorted(line for line in done.stderr.splitlines() if line.partition(".")[0] in ("llmctl", "trainer"))


def within(modules: list[str], *rooms: str) -> list[str]:
    return [module for module in modules if any(module == room or module.startswith(f"{room}.") for room in rooms)]


def test_a_command_loads_little_and_nothing_that_checks_trainings(tmp_path: Path) -> None:
    modules = loaded(tmp_path, "--", "echo", "hello")
    assert within(modules, "trainer.planning", "llmctl.scripts", "llmctl.submit.config_file") == []
    assert len(modules) <= MAX_FOR_COMMAND, modules


def test_a_config_loads_no_reader_of_scripts(tmp_path: Path) -> None:
    modules = loaded(tmp_path, "--nodes", "2", "examples/gpt_small.yaml")
    assert within(modules, "trainer.planning.build_config")
    assert within(modules, "llmctl.scripts", "trainer.planning.estimate") == []
