"""Stand-in for a scheduler whose answers the test writes.

Its commands are real processes: they record their calls, print a file that the test has written, and fail if the test
says so. The output of real schedulers is tested with recordings and with the schedulers themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmctl.backends.base import (
    LOGIN,
    Capabilities,
    DoctorCommands,
    HostCommand,
    JobReport,
    JobRequest,
    NodeReport,
    ProfileHints,
)
from llmctl.job_state import JobState
from llmctl.site.container import ContainerPlan

_SCRIPT = """
echo "$2 ${*:3}" >>"$1/calls"
if [[ -e $1/$2.do ]]; then . "$1/$2.do"; fi
if [[ -e $1/$2.error ]]; then cat "$1/$2.error" >&2; exit 1; fi
if [[ -e $1/$2 ]]; then cat "$1/$2"; fi
"""


@dataclass(frozen=True)
class ScriptedBackend:
    """Answers from ``folder``: ``queue``, ``accounting``, ``cancel``, ``nodes``.

    A file X.error makes X fail with the file's text. X.do runs before X.
    """

    folder: Path
    has_accounting: bool = True
    name: str = "scripted"
    template: str = "slurm.sh.j2"
    job_keys: frozenset[str] = frozenset()
    launchers: tuple[str, ...] = ("torchrun",)
    capabilities: Capabilities = Capabilities(has_queue=True)
    tells_ends_apart: bool = True

    def calls(self, kind: str = "") -> list[str]:
        """Recorded calls, as ``queue 17 18``."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(kind)]

    def says(self, kind: str, *lines: str) -> None:
        """Set the answer to ``kind``: lines ``id|WORD|name|reason|start|hosts|exit code|restarts``."""
        (self.folder / f"{kind}.error").unlink(missing_ok=True)
        (self.folder / kind).write_text("".join(f"{line}\n" for line in lines))

    def fails(self, kind: str, words: str) -> None:
        """Make ``kind`` fail with this text; a text with ``busy`` is a transient error."""
        (self.folder / f"{kind}.error").write_text(words + "\n")

    def does(self, kind: str, script: str) -> None:
        """Run this shell text before each answer to ``kind``."""
        (self.folder / f"{kind}.do").write_text(script + "\n")

    def _argv(self, kind: str, *words: str) -> list[str]:
        return ["bash", "-c", _SCRIPT, "bash", str(self.folder), kind, *words]

    def submit_commands(self, request: JobRequest) -> list[HostCommand]:
        raise NotImplementedError

    def next_job_argv(self, request: JobRequest) -> tuple[str, ...]:
        raise NotImplementedError

    def profile_hints(self) -> ProfileHints:
        raise NotImplementedError

    def doctor_commands(self) -> DoctorCommands:
        raise NotImplementedError

    def priority_problem(self, priority: int) -> str:
        raise NotImplementedError

    def options_problem(self, options: Sequence[str]) -> str:
        raise NotImplementedError

    def parse_job_id(self, output: str) -> str:
        return output.strip()

    def interactive_argv(self, request: JobRequest, script: str, command: Sequence[str]) -> list[str]:
        raise NotImplementedError

    def job_name(self, run_id: str) -> str:
        return f"job-{run_id}"

    def directives(self, request: JobRequest) -> list[str]:
        raise NotImplementedError

    def status_argv(self, job_ids: Sequence[str]) -> list[str]:
        return self._argv("queue", *job_ids)

    def parse_status(self, output: str) -> dict[str, JobReport]:
        reports = [_report(line) for line in output.splitlines()]
        return {report.job_id: report for report in reports}

    def is_answer(self, exit_status: int, stderr: str) -> bool:
        return exit_status == 0 or "no such job" in stderr

    def find_argv(self, job_name: str) -> list[str]:
        return self._argv("queue", f"name={job_name}")

    def accounting_argv(self, job_ids: Sequence[str]) -> list[str] | None:
        return self._argv("accounting", *job_ids) if self.has_accounting else None

    def parse_accounting(self, output: str) -> dict[str, JobReport]:
        return self.parse_status(output)

    def cancel_commands(self, job_ids: Sequence[str]) -> list[HostCommand]:
        return [HostCommand(LOGIN, tuple(self._argv("cancel", *job_ids)))]

    def nodes_argv(self) -> list[list[str]]:
        return [self._argv("nodes")]

    def parse_nodes(self, outputs: Sequence[str]) -> list[NodeReport]:
        """``name|state|reason|gpus|gpus used|queues``."""
        found = []
        for line in "".join(outputs).splitlines():
            name, state, reason, gpus, used, queues = line.split("|")
            found.append(
                NodeReport(
                    *(name, state, state.upper(), reason, int(gpus), int(used)),
                    cores=8,
                    memory_gib=64.0,
                    queues=tuple(queues.split(",")),
                )
            )
        return found

    def attach_argv(
        self,
        job_id: str,
        host: str,
        script: str,
        command: Sequence[str],
        container: ContainerPlan | None = None,
        *,
        cores: int | None = None,
    ) -> list[str]:
        raise NotImplementedError

    def is_transient(self, exit_status: int, stderr: str) -> bool:
        return exit_status != 0 and "busy" in stderr

    def was_not_taken(self, exit_status: int, stderr: str) -> bool:
        return self.is_transient(exit_status, stderr)

    def advice(self, stderr: str) -> str:
        return "ask the one who wrote this" if "refused" in stderr else ""


def _report(line: str) -> JobReport:
    fields = [*line.split("|"), *([""] * 8)][:8]
    job_id, raw, name, reason, start, hosts, code, restarts = fields
    words = {state.value.upper(): state for state in JobState}
    return JobReport(
        *(job_id, words.get(raw.partition(" ")[0], JobState.UNKNOWN), raw, name or None, reason, start or None),
        hosts=tuple(hosts.split(",")) if hosts else (),
        exit_code=int(code) if code else None,
        restarts=int(restarts) if restarts else None,
    )
