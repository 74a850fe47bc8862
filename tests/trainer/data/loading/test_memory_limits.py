"""Memory limit of a process: the least of all limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.data.loading.memory_limits import memory_limit

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/\n", {}, MACHINE),
        ("0::/job/step\n", {"job/step/memory.max": "max\n", "job/memory.max": "4096\n"}, 4096),
        ("0::/job/step\n", {"job/step/memory.max": "1024\n", "job/memory.max": "4096\n"}, 1024),
        ("0::/job/step\n", {"job/step/memory.max": "8192\n", "memory.max": "max\n"}, 8192),
        ("0::/\n", {"memory.max": "2048\n"}, 2048),
        ("0::/job\n", {"job/memory.max": str(4 * MACHINE)}, MACHINE),
        (
            "5:cpu,memory:/slurm/job_1/step_0\n1:name=systemd:/x\n0::/x\n",
            {
                "memory/slurm/job_1/step_0/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/slurm/job_1/memory.limit_in_bytes": "5000\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            5000,
        ),
        # In a container without a cgroup namespace the path is the host's, but the mount is the container's.
        ("9:memory:/docker/3f\n", {"memory/memory.limit_in_bytes": "3000\n"}, 3000),
        ("no group at all", {}, MACHINE),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, own: str, files: dict[str, str], limit: int) -> None:
    groups = tmp_path / "cgroup"
    for name, content in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(content)
    (tmp_path / "own").write_text(own)
    assert memory_limit(groups, tmp_path / "own") == limit


def test_a_machine_without_control_groups_has_its_own_memory(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, tmp_path / "none") == MACHINE
    assert 0 < memory_limit() <= MACHINE
