"""Nodes on which no rank has begun, from the attempt's list of hosts. Torch-free."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

from trainer.process.run_directory import RunDirectory

_MOST_NAMED = 4


def missing_nodes(run: RunDirectory, rank: int) -> str:
    """Words on the nodes of which no rank has a heartbeat; empty if there are none, or if they are not known.

    Launchers number ranks in the order of the hosts. ``rank`` checks that: this process must be on its host.
    """
    hosts = _host_of_each_rank(run)
    if rank >= len(hosts) or _short(hosts[rank]) != _short(socket.gethostname()):
        return ""
    begun = set()
    with suppress(OSError):
        # Listing makes a network file system refresh its cache.
        for name in os.listdir(run.heartbeat(0).parent):  # noqa: PTH208
            number = name.removeprefix("rank-").removesuffix(".json")
            if number.isdigit() and int(number) < len(hosts):
                begun.add(hosts[int(number)])
    return words_on([host for host in dict.fromkeys(hosts) if host not in begun])


def words_on(hosts: Sequence[str]) -> str:
    """``no rank has begun on node n3``, with a number in the place of many nodes; empty without one."""
    if not hosts:
        return ""
    more = f" and {len(hosts) - _MOST_NAMED} more" if len(hosts) > _MOST_NAMED else ""
    return f"no rank has begun on node {', '.join(hosts[:_MOST_NAMED])}{more}"


def _host_of_each_rank(run: RunDirectory) -> list[str]:
    found: list[str] = []
    with suppress(OSError):
        lines = (run.attempt_dir / "hostfile").read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            host, _, slots = line.partition(" slots=")
            found += [host.strip()] * (int(slots) if slots.strip().isdigit() else 0)
    return found


def _short(host: str) -> str:
    """Name without the domain; an address stays whole."""
    return host if host.replace(".", "").isdigit() else host.partition(".")[0]
