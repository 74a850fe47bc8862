"""``python -m trainer rendezvous``: print a free port and optionally this node's address.

Torch-free. Runs before the ranks of a job, on the node that will listen (rank 0's node).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import re
import socket
import struct
import sys
from collections.abc import Sequence

from trainer.process.launch_environment import port_of_job

_SIOCGIFADDR = 0x8915
"""netdevice(7): the IPv4 address of an interface."""
_ANY_PORT = 9
"""Port for a route lookup; connect(2) on a datagram socket sends no packet."""


class RendezvousError(ValueError):
    """No usable address or port.

    The message is one sentence with the cause and the remedy.
    """


def find_port(job_id: str, low: int, high: int, host: str | None = None, start: int | None = None) -> int | None:
    """First free port in ``low``..``high``, from the job id's port on.

    The result is None if all are taken.

    Must run on the node that will listen.

    Args:
        job_id: identifies the job.
        low: first port.
        high: last port.
        host: address of this node; the port must be free on this address too.
        start: port to try first; may be outside the range.

    Raises:
        OSError: ``host`` is not an address of this node.
    """
    if host is not None:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind((host, 0))
    if start is not None and _is_free(start, host):
        return start
    first = port_of_job(job_id, low, high) - low
    size = high - low + 1
    ports = (low + (first + step) % size for step in range(size))
    return next((port for port in ports if _is_free(port, host)), None)


def find_address(interface: str | None, peer: str | None) -> str:
    """IPv4 address at which the other nodes reach this node.

    Args:
        interface: network interface of the address; None: the interface of the route to ``peer``.
        peer: name or address of another node; None: there is no other node.

    Raises:
        RendezvousError: only the loopback address is available, which no other node can reach.
    """
    if interface is not None:
        address = _address_of(interface)
        if peer is not None and address.startswith("127."):
            raise RendezvousError(f"{interface} has the loopback address {address}; {_remedy()}")
        return address
    if peer is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, _ANY_PORT))
            address = str(probe.getsockname()[0])
        except OSError as error:
            raise RendezvousError(f"{peer} is not reachable from this node: {error}; {_remedy()}") from None
    if address.startswith("127."):
        raise RendezvousError(f"{peer} resolves to the loopback address of this node; {_remedy()}")
    return address


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            raise RendezvousError(f"the interface {interface} has no IPv4 address on this node; {_remedy()}") from None
    return socket.inet_ntoa(answer[20:24])


def _remedy() -> str:
    names = ", ".join(name for _, name in socket.if_nameindex())
    return f"set rendezvous.interface in the cluster's profile to one of {names}"


def _is_free(port: int, host: str | None) -> bool:
    # torch's TCPStore listens on the wildcard address, IPv6 first, so a listener on IPv4 or IPv6 makes the port
    # unusable. Without SO_REUSEADDR a port in TIME_WAIT counts as taken: the store might not get the port either.
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


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


def main(arguments: Sequence[str]) -> int:
    """Print the port, or address and port.

    Exit code 1: no free port or address; 2: wrong flags (argparse).
    """
    parser = argparse.ArgumentParser(prog="python -m trainer rendezvous", description=__doc__, allow_abbrev=False)
    parser.add_argument("--job-id", required=True, help="id of the job; different ids rarely get the same port")
    parser.add_argument("--ports", required=True, type=_port_range, metavar="LOW-HIGH")
    parser.add_argument("--start", type=_port, metavar="PORT", help="port to try first")
    parser.add_argument("--host", help="address of this node that the ranks will connect to")
    parser.add_argument("--interface", help="network interface for the IPv4 address of this node")
    parser.add_argument("--peer", help="another node of the job; without --interface the route to it gives the address")
    parser.add_argument("--with-address", action="store_true", help="print ADDRESS PORT")
    options = parser.parse_args(arguments)
    low, high = options.ports
    host = options.host
    try:
        if host is None and options.with_address:
            host = find_address(options.interface, options.peer)
        port = find_port(options.job_id, low, high, host, options.start)
    except RendezvousError as error:
        print(f"llmctl: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"--host {host}: not an address of this node: {error}", file=sys.stderr)
        return 1
    if port is None:
        print(f"every port of {low}-{high} is taken on this node", file=sys.stderr)
        return 1
    print(f"{host} {port}" if options.with_address else port)
    return 0
