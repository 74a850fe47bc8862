"""Cuts of the network between nodes, decided from the connections that ranks tell in their heartbeats. Pure.

A node is named alone only if all unanswered connections are its own, to at least two other nodes, and it has sent
without an answer as well as they have. Between two nodes nothing tells which of them is at fault: both are named.
"""

from contextlib import suppress
from typing import Any, Dict, FrozenSet, NamedTuple, Optional, Sequence, Set, Tuple

from .names import MOST_NAMED, name_words, rank_words

SILENT_S = 5.0
"""Seconds without an acknowledgement that are a cut: lost packets are sent again within a second."""
LEAST_RETRANSMISSIONS = 2


class Unanswered(NamedTuple):
    """A peer that does not acknowledge what a rank has sent (trainer/process/connections.py)."""

    address: str
    waiting_bytes: int
    retransmissions: int
    silent_s: float


class Network(NamedTuple):
    """Own addresses of a rank's connections to other machines, and the peers that do not answer."""

    addresses: Tuple[str, ...] = ()
    unanswered: Tuple[Unanswered, ...] = ()


class Side(NamedTuple):
    """A rank, its host and its connections.

    Attributes:
        later_s: seconds since its heartbeat was written.
        most_s: seconds since its last progress.
    """

    rank: int
    host: str
    network: Network
    later_s: float
    most_s: float


class Cut(NamedTuple):
    """A cut of the network.

    Attributes:
        ranks: of the one node that does not answer; empty if nothing tells which side is at fault.
        sentence: names the nodes.
    """

    ranks: Tuple[int, ...]
    sentence: str


def read_network(value: Any) -> Network:
    """``network`` of a heartbeat; entries that cannot be read are left out."""
    if not isinstance(value, dict):
        return Network()
    addresses, entries = value.get("addresses"), value.get("unanswered")
    found = []
    for entry in entries if isinstance(entries, list) else ():
        with suppress(TypeError, ValueError):
            address, waiting, count, silent_s = entry
            found.append(Unanswered(str(address), int(waiting), int(count), float(silent_s)))
    own = addresses if isinstance(addresses, list) else []
    return Network(tuple(one for one in own if isinstance(one, str)), tuple(found))


def find_cut(sides: Sequence[Side]) -> Optional[Cut]:
    """The cut that unanswered connections between the hosts of ranks tell; None without any.

    Args:
        sides: of all ranks known.
    """
    silences = _silences(sides)
    pairs = {frozenset(link) for link in silences}
    if not pairs:
        return None
    if len(pairs) == 1:
        return Cut((), _pair(silences))
    common: FrozenSet[str] = frozenset.intersection(*pairs)
    if len(common) == 1:
        return _star(next(iter(common)), silences, sides)
    named = [name_words(sorted(pair)) for pair in sorted(pairs, key=sorted)]
    more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    words = "; ".join(named[:MOST_NAMED])
    return Cut((), f"nodes do not reach each other for {max(silences.values()):.0f} s: {words}{more}")


def _silences(sides: Sequence[Side]) -> Dict[Tuple[str, str], float]:
    """Host and the host that does not answer it -> seconds."""
    hosts: Dict[str, Set[str]] = {}
    for side in sides:
        for address in side.network.addresses:
            hosts.setdefault(address, set()).add(side.host)
    found: Dict[Tuple[str, str], float] = {}
    for side in sides:
        for peer in side.network.unanswered:
            silent_s = min(peer.silent_s + side.later_s, side.most_s)
            # Every host may have an address of the same private network, such as that of its containers.
            others = hosts.get(peer.address, set())
            if len(others) != 1 or side.host in others:
                continue
            if silent_s >= SILENT_S and peer.retransmissions >= LEAST_RETRANSMISSIONS:
                link = (side.host, next(iter(others)))
                found[link] = max(found.get(link, 0.0), silent_s)
    return found


def _pair(silences: Dict[Tuple[str, str], float]) -> str:
    first, second = min(silences)
    sent = f"{first} has sent to {second} for {max(silences.values()):.0f} s without an answer"
    back = f", and {second} to {first}" if (second, first) in silences else ""
    return f"{name_words(sorted((first, second)))} do not reach each other: {sent}{back}"


def _star(host: str, silences: Dict[Tuple[str, str], float], sides: Sequence[Side]) -> Cut:
    """The cut of one host from several others."""
    to_it = sorted(sender for sender, receiver in silences if receiver == host)
    from_it = sorted(receiver for sender, receiver in silences if sender == host)
    seconds = f"for {max(silences.values()):.0f} s without an answer"
    if not to_it or not from_it:
        if from_it:
            return Cut((), f"{host} does not reach {name_words(from_it)}: it has sent to them {seconds}")
        return Cut((), f"{name_words(to_it)} do not reach {host}: they have sent to it {seconds}")
    ranks = tuple(sorted(side.rank for side in sides if side.host == host))
    back = "them" if from_it == to_it else name_words(from_it)
    has = "have" if len(to_it) > 1 else "has"
    words = f"{name_words(to_it)} {has} sent to it {seconds}, and it to {back}"
    return Cut(ranks, f"{host} ({rank_words(ranks)}) does not answer: {words}")
