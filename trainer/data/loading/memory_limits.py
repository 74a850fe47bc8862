"""Memory limit of a process: of the machine, the scheduler or the container."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def memory_limit(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> int:
    """Memory limit in bytes: the least of the machine's and all control groups'.

    Args:
        groups: mount point of the control groups, version 1 or 2 (cgroups(7)).
        own_groups: file that lists this process's control groups.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    lines: list[str] = []
    with suppress(OSError):
        lines = own_groups.read_text().splitlines()
    for line in lines:
        _, _, of_group = line.partition(":")
        controllers, _, own = of_group.partition(":")
        if not controllers:
            limits += _limits(groups, own, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(groups / "memory", own, "memory.limit_in_bytes")
    return min(limits)


def _limits(mounted: Path, own: str, name: str) -> list[int]:
    """Limits of the group ``own`` and of the enclosing groups.

    A container may see its group as ``mounted``.
    """
    found = []
    group = mounted / own.lstrip("/")
    for level in (group, *group.parents):
        # "max" instead of a number means no limit; the outermost group has no file.
        with suppress(OSError, ValueError):
            found.append(int((level / name).read_text()))
        if level == mounted:
            break
    return found
