"""``python -m trainer rendezvous``: a free port for the ranks of one job to meet at. Torch-free."""

from __future__ import annotations

import argparse
import contextlib
import re
import socket
import sys
from collections.abc import Sequence

from trainer.launch_environment import port_of_job


def find_port(job_id: str, low: int, high: int, host: str | None = None) -> int | None:
    """The first free port of ``low``..``high``, beginning where the job id points; None if all are taken.

    Must run on the node that will listen. With ``host`` the port must be free on that address too, which must be one
    of this node's own.

    Raises:
        OSError: ``host`` is no address of this node.
    """
    if host is not None:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind((host, 0))
    start = port_of_job(job_id, low, high) - low
    size = high - low + 1
    ports = (low + (start + step) % size for step in range(size))
    return next((port for port in ports if _is_free(port, host)), None)


def _is_free(port: int, host: str | None) -> bool:
    # torch's TCPStore listens on the wildcard address, IPv6 first; a listener on either keeps us away. Without
    # SO_REUSEADDR a port in TIME_WAIT counts as taken, which is right: the store might not get it either.
    addresses = [(socket.AF_INET, ""), (socket.AF_INET6, "::")]
    if host is not None:
        addresses.append((socket.AF_INET, host))
    for family, address in addresses:
        with contextlib.ExitStack() as stack:
            try:
                listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError:
                continue  # a kernel without IPv6
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


def _port_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < low <= high < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW-HIGH with ports from 1 to 65535")
    return low, high


def main(arguments: Sequence[str]) -> int:
    """Print the port; 1 if none is free, 2 for bad flags (argparse)."""
    parser = argparse.ArgumentParser(prog="python -m trainer rendezvous", description=__doc__, allow_abbrev=False)
    parser.add_argument("--job-id", required=True, help="identifies the job; ports of different ids rarely meet")
    parser.add_argument("--ports", required=True, type=_port_range, metavar="LOW-HIGH")
    parser.add_argument("--host", help="address of this node that the ranks will connect to")
    options = parser.parse_args(arguments)
    low, high = options.ports
    try:
        port = find_port(options.job_id, low, high, options.host)
    except OSError as error:
        print(f"--host {options.host}: not an address of this machine: {error}", file=sys.stderr)
        return 1
    if port is None:
        print(f"every port of {low}-{high} is taken on this node", file=sys.stderr)
        return 1
    print(port)
    return 0
