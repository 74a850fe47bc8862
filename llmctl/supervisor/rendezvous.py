"""Port for the rendezvous of the ranks, reserved while this process lives."""

import fcntl
import os
import re
import socket
import stat
import sys
from typing import Iterator, Optional

from .settings import JobSettings


def reserve_port(job: JobSettings, job_id: str) -> Optional[int]:
    """Reserve a free port; returns None if all ports are taken.

    The first choice follows from the job's id, as job.sh states. If that port is taken, the next ports are tried. Must
    run on the node that will listen. The lock is held until this process ends.

    Args:
        job: gives the range of ports, or the site's own rule.
        job_id: the scheduler's id, or a process id.
    """
    folder = _lock_folder()
    for port in _candidates(job, job_id):
        if _is_free(port) and (folder is None or _lock(f"{folder}/{port}")):
            return port
    low, high = job.ports
    print(f"llmctl: no free port in {low}-{high}; widen rendezvous.ports in the profile", file=sys.stderr)
    return None


def _candidates(job: JobSettings, job_id: str) -> Iterator[int]:
    match = re.match(r"\d+", job_id)
    number = int(match.group()) if match else 0
    if job.port_rule is not None:
        base, modulus = job.port_rule
        yield base + number % modulus
    low, high = job.ports
    size = high - low + 1
    for step in range(size):
        yield low + (number + step) % size


def _is_free(port: int) -> bool:
    """True if the port can be bound on both wildcard addresses.

    torch's store listens on one of the two addresses, IPv6 first. Without SO_REUSEADDR a port in TIME_WAIT counts as
    taken. That is right: the store might not get the port either.
    """
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a kernel without IPv6
        with listener:
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listener.bind((address, port))
            except OSError:
                if family == socket.AF_INET6 and not _has_ipv6():
                    continue
                return False
    return True


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _lock_folder() -> Optional[str]:
    """Folder of this user's locks; None if the folder is missing or another user's."""
    folder = f"/tmp/llmctl-ports-{os.getuid()}"
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return None
    return folder if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() else None


def _lock(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return True  # no lock is better than no run
    try:
        # Never closed: the lock ends with this process.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return False
    return True
