"""The environment of a cluster's jobs, or of one run, for a person: what a shell in it is given."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmctl.attempt_reader import attempt_numbers
from llmctl.errors import RecordError
from llmctl.file_reads import FileRead
from llmctl.hands import Hands
from llmctl.log_choice import spans
from llmctl.logs import rank_logs
from llmctl.run_facts import Heartbeat, parse_heartbeat
from llmctl.run_record import RunRecord


@dataclass(frozen=True)
class RunVisit:
    """A run whose environment is wanted.

    Attributes:
        record: of the run.
        variables: those of its jobs that can be given to a visitor; secrets are not.
        remark: what the visitor should know; may be empty.
    """

    record: RunRecord
    variables: Mapping[str, str]
    remark: str = ""

    @property
    def is_on_cpu(self) -> bool:
        """Whether its config keeps it off the GPUs."""
        return bool((self.record.config or {}).get("training", {}).get("device") == "cpu")


def visit_run(record: RunRecord, hands: Hands, rank: int | None) -> RunVisit:
    """What a visitor of a run is given; with ``rank``, also which process that rank is.

    Raises:
        RecordError: the rank is not there; says which are.
    """
    variables = dict(record.job.get("env", {}))
    attempts = attempt_numbers(record, hands)
    if attempts:
        variables["LLMCTL_ATTEMPT"] = str(attempts[-1])
    if rank is None:
        return RunVisit(record, variables)
    if not attempts:
        raise RecordError(f"{record.run_id}: there is no rank {rank}; it has made no attempt yet")
    folder = f"{record.run_dir}/attempts/{attempts[-1]}"
    (names,) = hands.list_names([folder])
    present = rank_logs(names)
    if rank not in present:
        there = f"there are ranks {spans(sorted(present))}" if present else "no rank has started yet"
        raise RecordError(f"{record.run_id}: there is no rank {rank} in attempt {attempts[-1]}; {there}")
    variables["LLMCTL_RANK"] = str(rank)
    (part,) = hands.read_parts([FileRead(f"{folder}/heartbeat/rank-{rank:05d}.json")])
    heartbeat = parse_heartbeat(part.data if part is not None else None)
    if heartbeat is None or not _lives(record, heartbeat, hands):
        return RunVisit(record, variables, f"rank {rank} has ended")
    variables["LLMCTL_RANK_PID"] = str(heartbeat.pid)
    doing = f"in phase {heartbeat.phase} of iteration {heartbeat.iteration}"
    return RunVisit(record, variables, f"rank {rank} is process {heartbeat.pid} on {heartbeat.host}, {doing}")


def _lives(record: RunRecord, heartbeat: Heartbeat, hands: Hands) -> bool:
    # Only what carries the run in its environment: the pid in an old heartbeat may be another process's by now.
    return heartbeat.pid in {one.pid for one in hands.processes_of_run(str(record.run_dir), [])}


def code_variables(code: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH with a folder of code before what is there."""
    return {"PYTHONPATH": ":".join(path for path in (str(code), environ.get("PYTHONPATH", "")) if path)}
