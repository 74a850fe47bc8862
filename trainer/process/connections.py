"""Peers that do not answer this process's TCP connections, by the kernel of Linux. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import struct
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LEAST_ATTEMPTS = 2
"""One packet may be lost on any network."""
_FOLDER = Path("/proc/self/fd")
_MOST_ADDRESSES = 8
_MOST_PEERS = 16
"""Most entries of a heartbeat, which should fit in a page."""
_TCP_INFO = struct.Struct("=7Bx13I")
"""Beginning of ``struct tcp_info`` (linux/tcp.h), which later kernels only extend."""
_STATE, _RETRANSMITS, _PROBES, _LAST_SENT, _LAST_ANSWER = 0, 2, 3, 16, 19
_ESTABLISHED = 1


@dataclass(frozen=True)
class Unanswered:
    """A peer that does not acknowledge what this process has sent.

    Attributes:
        address: of the peer.
        waiting_bytes: in the send queues of the connections to it.
        retransmissions: of the same bytes so far, or probes without an answer.
        silent_s: seconds since its last acknowledgement.
    """

    address: str
    waiting_bytes: int
    retransmissions: int
    silent_s: float


@dataclass(frozen=True)
class Connections:
    """This process's ends of its TCP connections to other machines, and the peers that do not answer."""

    addresses: tuple[str, ...] = ()
    unanswered: tuple[Unanswered, ...] = ()

    @property
    def peers(self) -> tuple[str, ...]:
        """Addresses of the peers that do not answer."""
        return tuple(sorted(peer.address for peer in self.unanswered))

    def values(self) -> dict[str, object]:
        """Values of a heartbeat; empty without a connection."""
        if not self.addresses:
            return {}
        unanswered = [
            [peer.address, peer.waiting_bytes, peer.retransmissions, round(peer.silent_s, 1)]
            for peer in self.unanswered
        ]
        return {"addresses": list(self.addresses), **({"unanswered": unanswered} if unanswered else {})}


def read_connections(most_s: float) -> Connections:
    """The connections of this process, by TCP_INFO of its sockets (tcp(7)); empty where that cannot be read.

    A peer whose process is stopped or does not read still answers: its kernel acknowledges bytes, and each probe of a
    window that is closed because its buffer is full. Only a cut network, or a peer without power, leaves several
    packets in a row without an answer. Bytes that cannot leave this machine are probes to the kernel, too.

    Args:
        most_s: seconds that the process has waited; a connection may have been idle before.
    """
    if not sys.platform.startswith("linux"):
        return Connections()
    addresses: set[str] = set()
    unanswered: dict[str, Unanswered] = {}
    for own, peer in _established():
        addresses.add(own)
        if peer is not None:
            before = unanswered.get(peer.address, Unanswered(peer.address, 0, 0, 0.0))
            unanswered[peer.address] = Unanswered(
                peer.address,
                before.waiting_bytes + peer.waiting_bytes,
                max(before.retransmissions, peer.retransmissions),
                max(before.silent_s, min(peer.silent_s, most_s)),
            )
    longest = sorted(unanswered.values(), key=lambda peer: (-peer.silent_s, peer.address))
    return Connections(tuple(sorted(addresses)[:_MOST_ADDRESSES]), tuple(longest[:_MOST_PEERS]))


def _established() -> Iterator[tuple[str, Unanswered | None]]:
    """Own address of each connection to another machine, and its peer if that does not answer."""
    files: list[Path] = []
    with contextlib.suppress(OSError):
        files = list(_FOLDER.iterdir())
    for file in files:
        # Other threads open and close files meanwhile.
        with contextlib.suppress(OSError, ValueError, struct.error):
            number = int(file.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            # A second file descriptor: another thread may close the first one, and its number be used again.
            with _socket_of(os.dup(number)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    yield from _facts(one)


def _socket_of(number: int) -> socket.socket:
    try:
        return socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise


def _facts(one: socket.socket) -> Iterator[tuple[str, Unanswered | None]]:
    facts = _TCP_INFO.unpack(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    if facts[_STATE] != _ESTABLISHED:
        return
    own, peer = (_plain(name[0]) for name in (one.getsockname(), one.getpeername()))
    if ipaddress.ip_address(peer).is_loopback:
        return
    # Any answer sets the probes to 0. Retransmissions end with progress only: a window may close over sent bytes.
    retransmissions = facts[_RETRANSMITS] if facts[_LAST_ANSWER] > facts[_LAST_SENT] else 0
    attempts = max(retransmissions, facts[_PROBES])
    if attempts < LEAST_ATTEMPTS:
        yield own, None
        return
    waiting = struct.unpack("=i", fcntl.ioctl(one, termios.TIOCOUTQ, bytes(4)))[0]
    yield own, Unanswered(peer, waiting, attempts, facts[_LAST_ANSWER] / 1000.0)


def _plain(address: str) -> str:
    """The address without its interface, an IPv4 address in an IPv6 one as itself."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
