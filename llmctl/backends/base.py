"""What every scheduler is asked. Answers are pure: argv to run, text to parse. No I/O; transport.py has the hands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class HostCommand:
    """One command and the host that it is run on.

    Attributes:
        host: where; ``localhost`` is this machine.
        argv: what.
    """

    host: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class SubmittedJob:
    """What a submission left behind on one host.

    Attributes:
        host: the host whose scheduler (or process table) knows the job.
        job_id: the scheduler's id, or the process id where there is no scheduler.
        pid: process id of job.sh where there is no scheduler, else None.
        pid_start_time: clock ticks from the host's start to the process's; names it together with ``boot_id``.
        boot_id: the host's start that ``pid`` belongs to.
    """

    host: str
    job_id: str
    pid: int | None = None
    pid_start_time: int | None = None
    boot_id: str | None = None


class Backend(Protocol):
    """What every backend answers, with or without a queue.

    Attributes:
        name: the scheduler, as profiles name it.
        template: file name of the job script's template.
        job_keys: keys of the config's ``job`` section that mean something here; others are refused, not ignored.
        launchers: what can start the ranks here, the default first.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (described above)
    @property
    def template(self) -> str: ...  # noqa: D102
    @property
    def job_keys(self) -> frozenset[str]: ...  # noqa: D102
    @property
    def launchers(self) -> tuple[str, ...]: ...  # noqa: D102

    def submit_commands(self, script: str) -> list[HostCommand]:
        """One command for a batch scheduler, one per host where jobs are started directly.

        Args:
            script: absolute path of job.sh.
        """

    def parse_job_id(self, output: str) -> str:
        """The job id that a submit command printed.

        Raises:
            SchedulerError: there is none in ``output``; quotes it.
        """

    def interactive_argv(self, script: str, command: Sequence[str]) -> list[str]:
        """Runs the text of an interactive script (see render.interactive_script) on a node.

        Args:
            script: the text. Runs ``command``, or a shell if that is empty.
            command: argv of what to run in the job's environment.
        """
