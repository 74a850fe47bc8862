"""How much memory a process may take: that of the machine, or less where a scheduler or a container limits it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def memory_limit(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> int:
    """Bytes: the least of the machine's memory and the limits of this process's control groups and all around them.

    Args:
        groups: where control groups of either version of cgroups(7) are mounted.
        own_groups: which of them are this process's.
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
    """Those of the group ``own`` and of the groups around it; a container may see its own as ``mounted``."""
    found = []
    group = mounted / own.lstrip("/")
    for level in (group, *group.parents):
        # No number where there is no limit ("max"), no file in the outermost group.
        with suppress(OSError, ValueError):
            found.append(int((level / name).read_text()))
        if level == mounted:
            break
    return found
