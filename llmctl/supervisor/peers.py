"""Machines of one run without a scheduler, and how they know of each other.

Each says every few seconds that it is there (beat-NNNNN), and at its end how its part ended (exit-NNNNN.json). Silence
is counted in looks and not by the clock: a machine that hangs in a slow file system is not thought dead.
"""

import json
import os
import socket
import time
from contextlib import suppress
from typing import Dict, List, NamedTuple, Set

from .attempt import Attempt
from .settings import JobSettings

LOOKS_PER_SECOND = 2
_BEATS_TO_DIE = 10
_LOOKS_TO_COME = 240
"""A machine that has not begun at all gets 120 s."""


class PeerLoss(NamedTuple):
    """A failed or silent part of a run on another machine."""

    node: int
    code: int
    sentence: str


class Peers:
    """The other machines of a run, as one of them sees them."""

    def __init__(self, job: JobSettings, attempt: Attempt, node: int) -> None:
        """Watch from the machine of this node."""
        self._attempt = attempt
        self._hosts = job.hosts
        self._node = node
        self._nodes = job.nodes
        self._looks = 0
        self._looks_per_beat = min(job.stop_grace_s, 60) // 5 + 1
        self._beats: Dict[int, str] = {}
        self._silence: Dict[int, int] = {}
        self._ended: Set[int] = set()

    @property
    def all_have_ended(self) -> bool:
        """True if nothing more is to be heard of any other machine."""
        return len(self._ended) >= self._nodes - 1

    def look(self) -> List[PeerLoss]:
        """Beat, and see which machines have failed since the last look.

        Call twice a second.
        """
        names = set()
        with suppress(OSError):
            # Reading the directory makes a network file system look again.
            names = set(os.listdir(self._attempt.folder))
        is_beat = self._looks % self._looks_per_beat == 0
        if is_beat:
            with suppress(OSError), open(f"{self._attempt.folder}/beat-{self._node:05d}", "w") as file:
                file.write(f"{self._looks}\n")
        self._looks += 1
        losses = []
        for peer in range(self._nodes):
            if peer == self._node or peer in self._ended:
                continue
            name = f"exit-{peer:05d}.json"
            if name in names:
                losses += self._read_end(peer, name)
            elif is_beat:
                losses += self._hear(peer)
        return losses

    def write_head_end(self, code: int) -> None:
        """Tell the others how the head's own part ended.

        exit.json of the run comes when all parts have ended.
        """
        values = {"code": code, "time": int(time.time()), "node": socket.gethostname()}
        self._attempt.write("exit-00000.json", values)

    def _read_end(self, peer: int, name: str) -> List[PeerLoss]:
        code = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            with open(f"{self._attempt.folder}/{name}", encoding="utf-8") as file:
                code = int(json.loads(file.read())["code"])
        if code is None:
            return []
        self._ended.add(peer)
        return [PeerLoss(peer, code, self._sentence(peer, f"ended with exit code {code}"))] if code else []

    def _hear(self, peer: int) -> List[PeerLoss]:
        beat = ""
        with suppress(OSError), open(f"{self._attempt.folder}/beat-{peer:05d}", errors="replace") as file:
            beat = file.read()
        if beat != self._beats.get(peer, ""):
            self._beats[peer], self._silence[peer] = beat, 0
            return []
        self._silence[peer] = self._silence.get(peer, 0) + 1
        patience = _BEATS_TO_DIE if beat else _LOOKS_TO_COME // self._looks_per_beat + 1
        if self._silence[peer] <= patience:
            return []
        self._ended.add(peer)
        seconds = patience * self._looks_per_beat // LOOKS_PER_SECOND
        return [PeerLoss(peer, 1, self._sentence(peer, f"has not been heard of for {seconds} s"))]

    def _sentence(self, peer: int, what: str) -> str:
        return f"node {peer} ({self._hosts[peer]}) {what}"
