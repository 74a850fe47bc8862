"""``Run``: one run of this user, by its id, name or job id."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmctl.api.call import Answer, calling, plain
from llmctl.context import ClusterSession
from llmctl.operate.cancel import GRACE_S, Cancelled, cancel_entry
from llmctl.operate.follow import end_of_run
from llmctl.operate.history import PastRun, find_runs, with_costs
from llmctl.operate.plot.histories import read_columns
from llmctl.operate.resume import planned_resume
from llmctl.operate.run_logs import find_logs, log_choice, log_ends, notes_before
from llmctl.operate.survey import RunSurvey, wait_for_end
from llmctl.runs.index import IndexEntry
from llmctl.runs.record import RunRecord
from llmctl.runs.scheduler_query import INTERVAL_S
from llmctl.runs.view import RunView
from llmctl.submit.execute import execute_plan
from llmctl.submit.plan import notes_beforehand


class Run:
    """A run. Every method reads the present state; a method on a remote cluster connects, and closes the connection.

    Methods may be called from any thread.
    """

    def __init__(self, reference: str, *, answer: Answer | None = None) -> None:
        """Find a run in this user's index; contacts no machine.

        Args:
            reference: run id, its beginning, run name or job id.
            answer: answers questions of ssh in all methods. Without one, what needs an answer fails.

        Raises:
            RecordError: no run matches, or several do.
        """
        with calling("llmctl.Run", reference) as call:
            self._entry = call.context.index.find(reference)
        self._messages: tuple[str, ...] = ()
        self._answer = answer

    @classmethod
    def of(cls, entry: IndexEntry, messages: Sequence[str] = (), answer: Answer | None = None) -> "Run":
        """The run of an entry of the index, with the messages of its submission."""
        run = cls.__new__(cls)
        run._entry, run._messages, run._answer = entry, tuple(messages), answer
        return run

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.run_id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.run_id == other.run_id

    def __hash__(self) -> int:
        return hash(self.run_id)

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self._entry.run_id

    @property
    def name(self) -> str:
        """The user's name for the run."""
        return self._entry.name

    @property
    def cluster(self) -> str:
        """Name of the cluster's profile."""
        return self._entry.cluster

    @property
    def run_dir(self) -> Path:
        """Directory of the run, on the cluster's machine."""
        return self._entry.run_dir

    @property
    def messages(self) -> tuple[str, ...]:
        """Warnings and remarks of the submission that returned this object; empty for a run that was looked up."""
        return self._messages

    def status(self) -> RunView:
        """The state of the run, with the facts of ``llmctl status --json``. Contacts its cluster.

        Raises:
            SchedulerError: the cluster cannot be reached.
        """
        with calling("llmctl.Run.status", answer=self._answer) as call:
            survey = RunSurvey(call.context)
            (view,) = survey.look([self._entry])
            for error in survey.unreachable.values():
                raise error
            return with_costs(call.context, self._entry, view)

    def logs(
        self,
        rank: int | str | Sequence[int] | None = None,
        *,
        job: bool = False,
        lines: int | None = None,
        attempt: int | None = None,
    ) -> list[str]:
        """The last lines of the run's output, as ``llmctl logs`` shows them. Reads files on its cluster.

        Remarks, such as the reason why there are no lines, go to the logger ``llmctl``.

        Args:
            rank: a rank, several, ``"all"`` or ``"failed"``. None: rank 0, and before its first line the job's.
            job: the output of job.sh and its agents instead.
            lines: of each file. None: 100, or 20 of each of several files, whose lines begin with their source.
            attempt: number of the attempt. None: the last.

        Raises:
            RecordError: there is no such attempt or rank, or the record cannot be read.
            UsageError: ``rank`` is not valid, or the output is not divided by ranks.
            SchedulerError: the cluster cannot be reached.
        """
        words = rank if rank is None or isinstance(rank, (int, str)) else ",".join(map(str, rank))
        choice = log_choice(None if words is None else str(words), job=job)
        with calling("llmctl.Run.logs", answer=self._answer) as call:
            session = ClusterSession.of(call.context, self.cluster, f"run {self.run_id}")
            record = RunRecord.load(self.run_dir, session.transport)
            found = find_logs(record, session, choice, attempt, follow=False)
            ends = log_ends(found, lines, follow=False)
            for note in (*notes_before(found), *([ends.note] if ends.note else [])):
                call.context.tell(note)
            return [*ends.lines]

    def metrics(self, *keys: str, validation: bool = False) -> dict[str, list[float]]:
        """The run's numbers by column, all of one length: a row for each logged iteration. Reads metrics.jsonl.

        After a resume, the steps that were done again count once, as they were done last.

        Args:
            keys: keys of metrics.jsonl, or patterns such as ``*_loss``. None of them: all.
            validation: the rows of validations instead of those of training.

        Returns:
            ``iteration``, ``attempt``, and each key of which a row has a number: seconds, bytes, tokens. A number that
            a row does not have is NaN, as is a loss that was NaN. Empty lists for a run without rows.

        Raises:
            RecordError: the record cannot be read.
            SchedulerError: the cluster cannot be reached.
        """
        with calling("llmctl.Run.metrics", answer=self._answer) as call:
            return read_columns(call.context, self._entry, keys or ("*",), validation=validation)

    def wait(self, timeout: float | None = None, *, check: bool = True) -> RunView:
        """Wait until the run has ended; returns its last state. A lost connection is made again.

        Files are looked at every two seconds at most, the scheduler is asked every half minute.

        Args:
            timeout: seconds to wait; None: without a limit.
            check: raise an error for a run that did not complete. False: the returned state tells.

        Raises:
            WaitTimeout: the run has not ended in this time; it goes on. Also a TimeoutError.
            FollowedRunFailed: the run did not complete; names the first failing rank and the cause.
            SchedulerError: the cluster cannot be reached, and a later try cannot help.
        """
        with calling("llmctl.Run.wait", answer=self._answer) as call:
            view = wait_for_end(RunSurvey(call.context, interval_s=INTERVAL_S), self._entry, timeout, time.sleep)
        if check:
            end_of_run(view)
        return view

    def cancel(self, *, grace: float = GRACE_S) -> Cancelled:
        """End the run and all of its processes; returns once they have ended.

        The trainer saves at its next step. A run that has already ended stays as it is.

        Args:
            grace: seconds to save before all processes are killed.

        Raises:
            SchedulerError: a process or job could not be ended, or the cluster cannot be reached.
            RecordError: the run is another user's, or its record cannot be read.
        """
        with calling("llmctl.Run.cancel", answer=self._answer) as call:
            return cancel_entry(call.context, self._entry, grace_s=grace)

    def resume(
        self,
        *,
        nodes: int | None = None,
        exclude: str | Sequence[str] | None = None,
        set: Mapping[str, Any] | None = None,
    ) -> "Run":
        """Resume the ended run from its latest checkpoint, with its own config and code.

        Args:
            nodes: new number of nodes.
            exclude: nodes to leave out; an empty list leaves out none. None: as before.
            set: values by dotted key, laid over the run's config.

        Returns:
            The same run, with the messages of this submission.

        Raises:
            RecordError: the run has not ended, or its record, code or checkpoints cannot be found.
            UsageError, ConfigFileError, ProfileError: all problems, by flag, file and key, or profile.
            SchedulerError: the cluster cannot be reached, or did not accept the job.
        """
        left_out = exclude if exclude is None or isinstance(exclude, str) else ",".join(exclude)
        with calling("llmctl.Run.resume", self.run_id, answer=self._answer) as call:
            values = plain(set or {})
            resumed = planned_resume(call.context, self._entry, nodes=nodes, exclude=left_out, settings=values)
            with resumed as (plan, point):
                call.context.tell(f"{self.run_id}: {point.sentence}")
                for note in notes_beforehand(plan, call.context, has_page=False):
                    call.context.tell(note)
                execute_plan(plan, call.context)
            return Run.of(call.context.index.find(self.run_id), call.messages, self._answer)


def run(reference: str, *, answer: Answer | None = None) -> Run:
    """The run of a run id, its beginning, run name or job id: see ``Run``."""
    return Run(reference, answer=answer)


def runs(
    *,
    cluster: str | None = None,
    state: str | None = None,
    name: str | None = None,
    since: str | None = None,
    most: int | None = None,
    answer: Answer | None = None,
) -> list[PastRun]:
    """This user's runs, the newest first, with their state and what they used, as ``llmctl list`` has them.

    Contacts the clusters of the runs. A run on a cluster that cannot be reached has its last seen state.

    Args:
        cluster: only of this cluster.
        state: only in this state, such as ``failed``.
        name: only whose id contains this text.
        since: only created within, such as ``7d``.
        most: number of runs. None: all.
        answer: answers questions of ssh.

    Raises:
        UsageError: ``state`` or ``since`` is not valid.
    """
    with calling("llmctl.runs", answer=answer) as call:
        found, _ = find_runs(
            call.context,
            cluster=cluster,
            state=None if state is None else str(state),
            name=name,
            since=since,
            most=most,
        )
        return found
