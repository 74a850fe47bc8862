"""Heartbeats between the machines of one run without a scheduler.

Each machine writes a heartbeat every few seconds (beat-NNNNN), and its exit code when its part ends (exit-NNNNN.json).
Silence is counted in polls and not by the clock: a slow file system delays both sides and must not look like a death.
"""

import json
import os
import socket
import time
from contextlib import suppress
from typing import Dict, List, NamedTuple, Set

from .attempt import Attempt
from .settings import JobSettings

POLLS_PER_SECOND = 2
_MISSED_BEATS = 10
_POLLS_TO_BEGIN = 240
"""A machine gets 120 s to begin."""


class PeerFailure(NamedTuple):
    """Failure of a run's part on another machine, or ``is_silent``, the silence of the machine."""

    node: int
    code: int
    sentence: str
    is_silent: bool = False


class Peers:
    """The other machines of a run, seen from this machine."""

    def __init__(self, job: JobSettings, attempt: Attempt, node: int) -> None:
        """Watch the peers of a node."""
        self._attempt = attempt
        self._hosts = job.hosts
        self._node = node
        self._nodes = job.nodes
        self._polls = 0
        self._polls_per_beat = min(job.stop_grace_s, 60) // 5 + 1
        self._beats: Dict[int, str] = {}
        self._silence: Dict[int, int] = {}
        self._ended: Set[int] = set()
        self._silent: Set[int] = set()

    @property
    def all_have_ended(self) -> bool:
        """True if the part of every other machine has ended or failed."""
        return len(self._ended) >= self._nodes - 1

    @property
    def head_is_silent(self) -> bool:
        """True if the head node was given up for its silence."""
        return 0 in self._silent

    def write_beat(self) -> None:
        """Write a heartbeat now, before the launch."""
        self._polls += 1
        with suppress(OSError), open(f"{self._attempt.folder}/beat-{self._node:05d}", "w") as file:
            file.write(f"{self._polls}\n")

    def poll(self) -> List[PeerFailure]:
        """Write a heartbeat if due; returns the failures since the last poll.

        Call twice a second.
        """
        names = set()
        with suppress(OSError):
            # Reading the directory makes a network file system refresh its cache.
            names = set(os.listdir(self._attempt.folder))
        is_beat = self._polls % self._polls_per_beat == 0
        if is_beat:
            self.write_beat()
        else:
            self._polls += 1
        failures = []
        for peer in range(self._nodes):
            if peer == self._node or peer in self._ended:
                continue
            name = f"exit-{peer:05d}.json"
            if name in names:
                failures += self._read_end(peer, name)
            elif is_beat:
                failures += self._read_beat(peer)
        return failures

    def write_head_end(self, code: int) -> None:
        """Write the exit code of the head's part for the other machines.

        The run's exit.json follows when all parts have ended.
        """
        values = {"code": code, "time": int(time.time()), "node": socket.gethostname()}
        self._attempt.write("exit-00000.json", values)

    def _read_end(self, peer: int, name: str) -> List[PeerFailure]:
        code = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            with open(f"{self._attempt.folder}/{name}", encoding="utf-8") as file:
                code = int(json.loads(file.read())["code"])
        if code is None:
            return []
        self._ended.add(peer)
        return [PeerFailure(peer, code, self._sentence(peer, f"ended with exit code {code}"))] if code else []

    def _read_beat(self, peer: int) -> List[PeerFailure]:
        beat = ""
        with suppress(OSError), open(f"{self._attempt.folder}/beat-{peer:05d}", errors="replace") as file:
            beat = file.read()
        if beat != self._beats.get(peer, ""):
            self._beats[peer], self._silence[peer] = beat, 0
            return []
        self._silence[peer] = self._silence.get(peer, 0) + 1
        patience = _MISSED_BEATS if beat else _POLLS_TO_BEGIN // self._polls_per_beat + 1
        if self._silence[peer] <= patience:
            return []
        self._ended.add(peer)
        self._silent.add(peer)
        seconds = patience * self._polls_per_beat // POLLS_PER_SECOND
        return [PeerFailure(peer, 1, self._sentence(peer, f"has sent no heartbeat for {seconds} s"), is_silent=True)]

    def _sentence(self, peer: int, what: str) -> str:
        return f"node {peer} ({self._hosts[peer]}) {what}"
