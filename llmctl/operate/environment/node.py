"""A program for the Python of an environment, on the cluster; imports nothing of ours.

``node.py CORES GIB EACH`` prints the number of compilers that cores and memory of this node allow. CORES and GIB are
those of the kind of node, 0 if unknown, since the system may not limit a part of a node; EACH is the GiB of a compiler.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path


def _memory_limits() -> Iterator[int]:
    """Bytes that this process may use: the free memory, and the limits of its control groups (cgroups(7), v2)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    place = next((line[3:] for line in groups if line.startswith("0::")), "/")
    for folder in (Path(place), *Path(place).parents):
        try:
            yield int(Path(f"/sys/fs/cgroup{folder}/memory.max").read_text())
        except (OSError, ValueError):
            continue


def jobs(cores: float, gib: float, each: float) -> int:
    """Number of compilers, at least 1."""
    usable = min(len(os.sched_getaffinity(0)), cores or float("inf"))
    memory = min([*_memory_limits(), *([gib * 2**30] if gib else [])])
    return max(1, int(min(usable, memory // (each * 2**30))))


if __name__ == "__main__":
    print(jobs(*(float(word) for word in sys.argv[1:])))
