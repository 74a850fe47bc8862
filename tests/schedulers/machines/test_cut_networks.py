"""Heartbeats of a rank whose peer does not answer: a real network that is cut, and a peer that does not read."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmctl.supervisor.hangs.cuts import LEAST_RETRANSMISSIONS, read_network
from tests.schedulers.machines.two_hosts import HERE, THERE
from tests.waiting import HANG_S, wait_for

pytestmark = [pytest.mark.real, pytest.mark.programs("unshare", "ip", "iptables")]


class TwoHosts:
    """The program of two_hosts.py in a network of its own."""

    def __init__(self, folder: Path) -> None:
        (folder / "attempt/heartbeat").mkdir(parents=True)
        self._path = folder / "attempt/heartbeat/rank-00000.json"
        argv = ["unshare", "--net", sys.executable, "-m", "tests.schedulers.machines.two_hosts", str(self._path)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def say(self, command: str) -> tuple[int, int]:
        """Bytes that wait and doublings of the timer after a command."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        waiting, doublings = json.loads(self._process.stdout.readline())
        return waiting, doublings

    def beat(self) -> dict[str, Any]:
        """The heartbeat."""
        return json.loads(self._path.read_text())  # type: ignore[no-any-return]

    def end(self) -> None:
        """End the program."""
        self._process.communicate(timeout=HANG_S)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    two = TwoHosts(tmp_path)
    yield two
    two.end()


@pytest.mark.parametrize("chain", ["INPUT", "OUTPUT"])
def test_a_peer_behind_a_cut_is_told_until_the_network_is_back(hosts: TwoHosts, chain: str) -> None:
    hosts.say("send")
    hosts.say(f"cut {chain}")
    hosts.say("send")
    wait_for(lambda: hosts.say("")[1] > LEAST_RETRANSMISSIONS, "retransmissions")
    assert "network" not in hosts.beat()  # outside of any collective
    hosts.say("enter")
    wait_for(lambda: "unanswered" in hosts.beat().get("network", {}), hosts.beat)
    network = read_network(hosts.beat()["network"])
    (peer,) = network.unanswered
    assert network.addresses == (HERE,)
    assert (peer.address, peer.waiting_bytes) == (THERE, 1000)
    assert peer.retransmissions >= LEAST_RETRANSMISSIONS and peer.silent_s > 0
    hosts.say("heal")
    wait_for(lambda: "unanswered" not in hosts.beat()["network"], hosts.beat)
    wait_for(lambda: hosts.say("")[0] == 0, "the bytes at the peer")


def test_a_peer_that_does_not_read_answers(hosts: TwoHosts) -> None:
    hosts.say("enter")
    hosts.say("fill")
    wait_for(lambda: hosts.say("")[1] > LEAST_RETRANSMISSIONS + 2, "probes of a closed window")
    written = hosts.beat()["written"]
    wait_for(lambda: hosts.beat()["written"] > written and "network" in hosts.beat(), hosts.beat)
    assert hosts.say("")[0] > 0
    assert hosts.beat()["network"] == {"addresses": [HERE]}
