"""Watch of a launch line: signals, time limit, cancel requests and other machines."""

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from typing import Callable, Optional, Set, Tuple

from . import processes
from .attempt import Attempt, outcome_of_rank_0, tell
from .end_request import EndRequest
from .hangs.survivors import FirstFailure
from .hangs.watch import HangWatch
from .notices import Notices
from .peers import POLLS_PER_SECOND, Peers
from .settings import JobSettings
from .signals import Signals

CANCEL_GRACE_S = 10
"""Seconds to save after a cancel, unless attempts/K/cancel holds a number of seconds."""
KILL_GRACE_S = 10
"""Seconds between a request to end and a harder one."""
AT_ONCE_S = 1e-6
"""stop_after_s of a job whose time limit has passed before anything was launched."""
FAILURE_GRACE_S = 2
"""Seconds for the ranks to end by themselves after one has failed: they report whom they have lost."""
FAILURE_KILL_GRACE_S = 2
"""KILL_GRACE_S for ranks after a failure: they have nothing to save any more, and the job costs."""
ALIVE_EVERY_S = 5
"""Seconds between the supervisor's signs of life: few against those after which a rank counts as hanging."""
STACKS_WANTED = "stacks.wanted"
"""File of an attempt that asks its ranks for the stacks of their threads, each time that it grows."""
EARLY_WARNING_S = 300
"""Longest time between a scheduler's warning of the time limit and our own timer: Slurm's is up to 60 s (sbatch(1))."""


class Watch:
    """One attempt, from its launch line to the end of its processes.

    Attributes:
        code: exit code so far: of the launch line, or of a failed part on another machine.
        signal: the first signal received; TERM for a USR1 or USR2 that does not warn of the time limit.
        is_cancelled: attempts/K/cancel was read.
        is_late: the time limit had passed before the launch.
        lost: sentence on the first other machine that fell silent; empty without one.
        failed_peer: sentence on the first other machine whose part failed; empty without one.
        hang: sentence on the hang for which the attempt was ended; empty without one.
        hanging: ranks for which the others waited then.
    """

    def __init__(
        self,
        job: JobSettings,
        attempt: Attempt,
        signals: Signals,
        end_request: EndRequest,
        *,
        stop_after_s: float,
        left_s: Callable[[], Optional[float]] = lambda: None,
        peers: Optional[Peers] = None,
        notices: Optional[Notices] = None,
        is_head: bool = True,
        earlier: Optional[Attempt] = None,
    ) -> None:
        """Watch an attempt.

        Args:
            job: settings.
            attempt: the attempt of the launch line.
            signals: of this process.
            end_request: asks the launch line to end.
            stop_after_s: seconds from now until the run is asked to stop; 0 disables the timer.
            left_s: asks for the seconds until the scheduler's time limit; None if it has none or does not tell.
            peers: the other machines, if no scheduler watches them.
            notices: to the user; None on other machines than the head node.
            is_head: True on the head node, whose end is the run's end.
            earlier: the attempt before in the same job, whose cancel may have been meant for this one.
        """
        self.code = 0
        self.signal: Optional[str] = None
        self.is_cancelled = False
        self.is_late = stop_after_s == AT_ONCE_S
        self.lost = ""
        self.failed_peer = ""
        self.hang = ""
        self.hanging: Tuple[int, ...] = ()
        self._job = job
        self._attempt = attempt
        self._signals = signals
        self._end_request = end_request
        self._peers = peers
        self._notices = notices
        self._is_head = is_head
        self._earlier = earlier
        is_head_of_ranks = is_head and job.is_training
        self._hangs = HangWatch(job, attempt.folder) if is_head_of_ranks else None
        self._failures = FirstFailure(attempt.folder) if is_head_of_ranks else None
        self._began = time.monotonic()
        self._stop_after_s = stop_after_s
        self._ask_left_s = left_s
        self._deadline: Optional[float] = None
        self._is_asked = False
        self._has_failed = False
        self._has_launched = False
        self._is_timeout = False
        self._is_second_poll = False
        self._next_alive = self._began
        self._child: Optional["subprocess.Popen[bytes]"] = None

    @property
    def is_over(self) -> bool:
        """True if a signal or a cancel came before the launch, or after the end."""
        for name in self._signals.wait(0):
            self._on_signal(name)
        return "cancel" in self._names() or self.signal is not None

    @property
    def may_stay(self) -> bool:
        """True if this machine can take part in another attempt: nobody ends the run, and the head node is heard."""
        return not self.is_over and not (self._peers is not None and self._peers.head_is_silent)

    def poll_limit(self) -> None:
        """Ask the run to stop if its time is over; before the launch too, where the job began late."""
        over_s = time.monotonic() - self._began - self._stop_after_s
        if self._stop_after_s > 0 and over_s >= 0 and self.signal is None:
            after = "which has passed before the launch" if self.is_late else f"after {self._stop_after_s:.0f} s"
            tell(f"asked to stop at the time limit, {after}")
            self._on_signal("USR1")

    def write_beat(self) -> None:
        """Tell the other machines before the launch that this one lives."""
        if self._peers is not None:
            self._peers.write_beat()

    def run(self, child: "subprocess.Popen[bytes]") -> None:
        """Watch the launch line to its end; the head node waits for all machines."""
        self._child = child
        while child.poll() is None:
            self._poll()
            for name in self._signals.wait(1 / POLLS_PER_SECOND):
                self._on_signal(name)
        self._note_launch()
        status = processes.exit_code(child.returncode)
        if self.signal is not None and not self._has_launched:
            status = 0
        if self.code == 0:
            self.code = status
        if self._peers is not None and self._is_head:
            self._peers.write_head_end(self.code)
            while not self._peers.all_have_ended:
                self._poll_peers(self._peers, set())
                for name in self._signals.wait(1 / POLLS_PER_SECOND):
                    self._on_signal(name)

    def reason(self, code: int) -> str:
        """The reason of the end for exit.json.

        A request of the user comes first, then the outcome of rank 0, then the exit code.
        """
        outcome = outcome_of_rank_0(self._attempt.folder)
        if self._attempt.has("cancel"):
            return "cancelled"
        if self._is_timeout and not (code == 0 and outcome == "completed"):
            return "timeout"
        # A scheduler that ends a job signals the launcher too, which then fails although the ranks have saved.
        if outcome == "stopped" and (code == 0 or self.signal is not None):
            return "stopped"
        if self.signal is not None and not (self._job.is_training and self._has_launched):
            return "stopped"
        return "completed" if code == 0 else "failed"

    def _poll(self) -> None:
        now = time.monotonic()
        if self._is_head and now >= self._next_alive:
            self._attempt.write_alive()
            self._next_alive = now + ALIVE_EVERY_S
        self.poll_limit()
        names: Set[str] = set()
        if self._is_second_poll:
            # A cancel may come as a file alone: from another machine, or after a stop request.
            names = self._names()
        self._is_second_poll = not self._is_second_poll
        if self._peers is not None:
            self._poll_peers(self._peers, names)
        self._poll_ranks(names, now)
        if "cancel" in names and not self.is_cancelled:
            if self.signal is None:
                self._on_signal("TERM")
            else:
                self._read_cancel()
        if self._deadline is not None and now >= self._deadline:
            if self._is_asked and not self._end_request.can_do_more:
                self._kill()
            else:
                self._ask_child()
            self._is_asked = True
            is_hopeless = self._job.is_training and self._has_failed
            self._deadline = now + (FAILURE_KILL_GRACE_S if is_hopeless else KILL_GRACE_S)

    def _poll_ranks(self, names: Set[str], now: float) -> None:
        """Look for a hang and for a first failure, unless the run was asked to end anyway."""
        words = ""
        if self._hangs is not None and self.signal is None:
            self._look_for_hang(self._hangs, now)
            words = self._hangs.notice()
        if self._failures is not None and self.signal is None and self._failures.has_come(names):
            self._end_after_failure(FAILURE_GRACE_S)
        if self._notices is not None:
            self._notices.poll(words)

    def _look_for_hang(self, hangs: HangWatch, now: float) -> None:
        if hangs.poll(now):
            tell(f"hang: {hangs.sentence}")
            # Each rank that sees the file grow writes the stacks of its threads (trainer/process/stacks.py).
            with suppress(OSError), open(f"{self._attempt.folder}/{STACKS_WANTED}", "a") as file:
                file.write("\n")
        if hangs.is_over and not self.hang:
            self.hang, self.hanging = hangs.sentence, hangs.ranks
            tell(f"the attempt is ended because of the hang, after job.hang_timeout_s {self._job.hang_timeout_s:g}")
            self.code = self.code or 1
            if self._peers is not None:
                # The other machines end their parts at once, and not after this one.
                self._peers.write_head_end(self.code)
            self._end_after_failure(0)

    def _end_after_failure(self, grace_s: float) -> None:
        """Ask what is left to end, after a grace; a request for the end that was made before has its own."""
        self._has_failed = True
        if self._deadline is None:
            self._deadline = time.monotonic() + grace_s

    def _names(self) -> Set[str]:
        """Files of the attempt, with the cancel of the attempt before, which was newest for who wrote it.

        A network file system caches the absence of a file for a minute; reading the directory refreshes the cache.
        """
        names: Set[str] = set()
        with suppress(OSError):
            names = set(os.listdir(self._attempt.folder))
        if self._earlier is not None and "cancel" not in names:
            with suppress(OSError):
                if "cancel" in os.listdir(self._earlier.folder):
                    shutil.copyfile(f"{self._earlier.folder}/cancel", f"{self._attempt.folder}/cancel")
                    names.add("cancel")
        return names

    def _poll_peers(self, peers: Peers, names: Set[str]) -> None:
        if "stop" in names and self.signal is None:
            self._on_signal("TERM")
        for failure in peers.poll():
            tell(failure.sentence)
            self.code = self.code or failure.code
            if failure.is_silent:
                self.lost = self.lost or failure.sentence
            else:
                self.failed_peer = self.failed_peer or failure.sentence
            self._end_after_failure(FAILURE_GRACE_S if self._job.is_training else KILL_GRACE_S)

    def _on_signal(self, name: str) -> None:
        """Begin the end of the run, or hasten the end.

        After a first signal the trainer saves at its next step and exits. A second signal ends the run at once. A
        second warning of the time limit is ignored: the scheduler and our own timer each send a warning.
        """
        now = time.monotonic()
        is_warning = name.startswith("USR")
        if self.signal is not None:
            if not is_warning:
                self._deadline = now
            return
        self.signal = name
        self._begin_end(now)
        # Schedulers announce the time limit by USR1 or USR2, and any other end by TERM. A warning long before the limit
        # means preemption (Slurm: send_user_signal), after which the scheduler may requeue this job.
        if is_warning:
            self._is_timeout = self._is_near_limit(now)
            self.signal = name if self._is_timeout else "TERM"

    def _is_near_limit(self, now: float) -> bool:
        """True shortly before our own timer, or before a limit that was lowered after the job's start."""
        if self._stop_after_s <= now - self._began + EARLY_WARNING_S:
            return True
        left_s = self._ask_left_s()
        return left_s is not None and left_s <= self._job.stop_grace_s + EARLY_WARNING_S

    def _begin_end(self, now: float) -> None:
        """Ask the ranks to save and to exit."""
        if self._child is None:
            return
        self._note_launch()
        if not self._has_launched:
            # The launch line has not started any rank yet.
            self._kill()
            return
        with suppress(OSError), open(f"{self._attempt.folder}/stop", "a"):
            pass
        self._deadline = now + self._job.stop_grace_s
        if self._attempt.has("cancel"):
            self._read_cancel()
        if not self._job.is_training:
            self._ask_child()

    def _read_cancel(self) -> None:
        """Read the seconds that the trainer gets to save from attempts/K/cancel."""
        text = ""
        with suppress(OSError), open(f"{self._attempt.folder}/cancel", errors="replace") as file:
            text = file.readline().strip()
        seconds = int(text) if re.match(r"^[0-9]{1,6}$", text) else CANCEL_GRACE_S
        self._deadline = time.monotonic() + seconds
        self.is_cancelled = True

    def _note_launch(self) -> None:
        """Note if ranks may run: the launch line follows right after the hostfile."""
        self._has_launched = self._has_launched or self._attempt.has("hostfile")

    def _ask_child(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._end_request.send(self._child.pid)

    def _kill(self) -> None:
        if self._child is not None and self._child.poll() is None:
            processes.signal_group(self._child.pid, signal.SIGKILL)
        processes.kill_attempt(self._job.run_dir, self._attempt.number)
