"""Clients of the tests' ssh hosts, each with a separate configuration, and a terminal that answers questions."""

import os
import pty
import shutil
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.route import Route
from llmctl.transport.ssh.terminal import Terminal
from llmctl.transport.ssh.transport import RemoteTransport
from tests.testbeds.ssh_hosts import SshHosts
from tests.waiting import HANG_S

SEARCHED = "/usr/bin:/bin"


def client_environ(hosts: SshHosts, folder: Path, *lines: str, without: str = "", **variables: str) -> dict[str, str]:
    """Environment of a client: the hosts' configuration after ``lines``, minus the lines with ``without``."""
    folder.mkdir(exist_ok=True)
    kept = [line for line in hosts.config.read_text().splitlines() if not without or without not in line]
    (folder / "config").write_text("".join(f"{line}\n" for line in (*lines, *kept)))
    wrapper = folder / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh", path=SEARCHED)} -F {folder}/config "$@"\n')
    wrapper.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}


def transport_on(
    host: str, environ: dict[str, str], terminal: Terminal | None = None, **options: object
) -> RemoteTransport:
    """Transport on a host without a terminal to ask on; ``warnings`` collects its warnings."""
    warnings: list[str] = []
    route = Route(host, environ, terminal=terminal or Terminal("/nonexistent"))
    transport = RemoteTransport(route, warning=warnings.append, **options)  # type: ignore[arg-type]
    transport.warnings = warnings  # type: ignore[attr-defined]
    return transport


@contextmanager
def transport(*args: object, **options: object) -> Iterator[RemoteTransport]:
    """Transport on a host, closed at the end."""
    made = transport_on(*args, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def refusal(host: str, environ: dict[str, str], *, transient: bool, **options: object) -> str:
    """Error message for an unusable host."""
    with transport(host, environ, **options) as made, pytest.raises(SchedulerError) as caught:
        made.home()
    assert caught.value.transient is transient, caught.value.message
    assert len(caught.value.message.splitlines()) <= 2
    return caught.value.message


@contextmanager
def master(environ: dict[str, str], host: str) -> Iterator[None]:
    """The user's ControlMaster, ended at the end of the test."""
    subprocess.run(["ssh", "-fNM", host], env=environ, check=True, timeout=HANG_S, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        subprocess.run(["ssh", "-O", "exit", host], env=environ, check=False, timeout=HANG_S, capture_output=True)


class Person:
    """A user at a terminal, who types an answer to each expected question, in order."""

    def __init__(self, *answers: tuple[str, str]) -> None:
        self._ours, self._theirs = pty.openpty()
        self.terminal = Terminal(os.ttyname(self._theirs))
        self.seen = ""
        self._answers = list(answers)
        threading.Thread(target=self._type, daemon=True).start()

    @property
    def unused(self) -> list[tuple[str, str]]:
        """Expected questions that were not asked."""
        return self._answers

    def _type(self) -> None:
        answered = 0
        while True:
            try:
                self.seen += os.read(self._ours, 1024).decode()
                if self._answers and self._answers[0][0] in self.seen[answered:]:
                    answered = len(self.seen)
                    # A user types after the echo has been switched off.
                    while termios.tcgetattr(self._theirs)[3] & termios.ECHO:
                        time.sleep(0.01)
                    os.write(self._ours, f"{self._answers.pop(0)[1]}\n".encode())
            except (OSError, termios.error):
                return

    def leave(self) -> None:
        """Close the terminal."""
        os.close(self._theirs)
        os.close(self._ours)
