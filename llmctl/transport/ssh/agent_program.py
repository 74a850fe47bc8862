"""Agent on the login node: runs one call at a time, each a frame on standard input. Standard library, Python 3.7.

The agent ends when its standard input closes, or when it loses its caller. A caller that waits for an answer pings
every few seconds. Without pings the agent ends the running command and exits. Detached processes live on.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmctl.supervisor import trust
from llmctl.supervisor.bad_nodes import entries
from llmctl.transport import commands, file_reads, file_writes, processes
from llmctl.transport.ssh.frames import FrameError, FrameReader, pack
from llmctl.transport.ssh.login_environment import login_environment

CALLER_LOST_S = 25.0
"""Silence after which a caller that waits for an answer counts as lost."""
IDLE_S = 3600.0
"""Silence between two calls after which the agent ends."""
CRASHED = 97


class Agent:
    """Server of the calls.

    Attributes:
        output: file descriptor for the frames that are sent.
    """

    def __init__(self, output: int) -> None:
        self.output = output
        self._writing = threading.Lock()
        self._calls: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self._is_busy = False
        self._variables: dict[str, str] = dict(os.environ)
        self._asking = threading.Thread(target=self._ask_login_shell, daemon=True)
        self._acts: dict[str, Callable[..., Any]] = {
            "run": self.run,
            "start_detached": self.start_detached,
            "archive_for": archive_for,
            "append": append,
            "unpack": file_writes.unpack,
            "read_parts": file_reads.read_parts,
            "list_names": file_reads.list_names,
            "stat_paths": file_writes.stat_paths,
            "write_files": file_writes.write_files,
            "make_folder": file_writes.make_folder,
            "make_own_folder": file_writes.make_own_folder,
            "why_distrusted": trust.why_distrusted,
            "read_bad_nodes": entries.read_entries,
            "remove": file_writes.remove,
            "link": file_writes.link,
            "take_lock": file_writes.take_lock,
            "release_lock": file_writes.release_lock,
            "inspect_processes": processes.inspect,
            "processes_of_run": processes.processes_of_run,
            "end_run": processes.end_run,
        }

    def serve(self) -> None:
        """Answer until standard input ends."""
        self._asking.start()
        threading.Thread(target=self._listen, args=(threading.get_ident(),), daemon=True).start()
        self._send({"home": file_writes.home(), "python": sys.executable, "time": time.time()})
        while True:
            call = self._calls.get()
            if call is None:
                return
            answer = self._answer(call)
            self._is_busy = False
            self._send({**answer, "time": time.time()})

    def run(
        self, argv: Sequence[str], timeout_s: float, cwd: str | None, env: Mapping[str, str], stdin: bytes
    ) -> commands.CommandOutput:
        """Run a command in the environment of a login shell; see commands.run_command."""
        variables = {**self._environment(), **env}
        return commands.run_command(
            argv, env=variables, timeout_s=timeout_s, cwd=cwd or file_writes.home(), stdin=stdin
        )

    def start_detached(self, argv: Sequence[str], cwd: str, log: str) -> processes.ProcessIdentity:
        """Start a command in the environment of a login shell; see commands.start_detached."""
        return commands.start_detached(argv, env=self._environment(), cwd=cwd, log=log)

    def _environment(self) -> dict[str, str]:
        self._asking.join()
        return self._variables

    def _ask_login_shell(self) -> None:
        self._variables = login_environment(os.environ)

    def _answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"number": call["number"], "value": self._acts[call["act"]](*call["args"], **call["options"])}
        except OSError as error:
            os_error = [error.errno, error.strerror, None if error.filename is None else str(error.filename)]
            return {"number": call["number"], "os_error": os_error}
        except Exception:
            return {"number": call["number"], "failure": traceback.format_exc()}

    def _send(self, value: Any) -> None:
        try:
            frame = pack(value)
        except FrameError as error:
            frame = pack({"number": value["number"], "failure": str(error)})
        with self._writing:
            view = memoryview(frame)
            while view:
                view = view[os.write(self.output, view) :]

    def _listen(self, main_thread: int) -> None:
        """Read frames in a thread of its own: pass calls to the main thread, answer pings at once."""
        try:
            self._hear_until_lost()
        finally:
            self._calls.put(None)
            # If a command is running, the main thread ends the command before it exits.
            signal.pthread_kill(main_thread, signal.SIGTERM)
            time.sleep(10)
            os._exit(CRASHED)

    def _hear_until_lost(self) -> None:
        reader, heard = FrameReader(), time.monotonic()
        while True:
            if not select.select([0], [], [], 5.0)[0]:
                if time.monotonic() - heard > (CALLER_LOST_S if self._is_busy else IDLE_S):
                    return
                continue
            data = os.read(0, 1 << 20)
            if not data:
                return
            heard = time.monotonic()
            reader.feed(data)
            frame = reader.next()
            while frame is not None:
                if "act" in frame[0]:
                    self._is_busy = True
                    self._calls.put(frame[0])
                else:
                    self._send(frame[0])
                frame = reader.next()


def archive_for(folder: str) -> str | None:
    """Path for the archive of a new folder; None if the folder exists."""
    if os.path.isdir(folder):  # noqa: PTH112
        return None
    parent, name = os.path.split(os.path.normpath(folder))
    file_writes.make_parents(parent)
    return os.path.join(parent, f".{name}.{os.urandom(6).hex()}.tar")  # noqa: PTH118


def append(path: str, data: bytes) -> None:
    """Append to a file, which is created if missing."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with file_writes.naming_full(path), os.fdopen(descriptor, "wb") as file:
        file.write(data)


def main(marker: str) -> None:
    """Serve on the current standard output; later prints of any code go to standard error."""
    output = os.dup(1)
    os.dup2(2, 1)
    status = CRASHED
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        os.write(output, f"\n{marker}\n".encode("ascii"))
        Agent(output).serve()
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _leave(*_: object) -> None:
    raise SystemExit
