"""One case: a run, a fault, the end of the run, and the judgement."""

import itertools
import json
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from tests.faults.user_faults import FAULT_AT
from tests.schedulers.running import ranks_of
from tests.waiting import wait_for

GOING = ("pending", "running", "unknown")
_OF_RANK = re.compile(r"\b(?:rank (\d+)(?: \([^)]*\))?|torchrun|the command) on ([-.\w]+)")
_HANG = "llmctl: hang: "
_POLLS_BETWEEN_QUESTIONS = 20


@dataclass(frozen=True)
class Result:
    """Judgement of a case; the columns of the table.

    Attributes:
        kind: name.
        bed: name.
        number: of the case among those of its kind and bed.
        detected_s: seconds from the fault to exit.json, or to the words that tell the fault; None if nothing told.
        is_named: class and culprit are right.
        is_recovered: the run has ended as the kind asks for, in as many attempts, without a person.
        lost_steps: of the first attempt.
        wrong: sentences on what is wrong beyond that.
        seen: the end of the run, its classes and causes.
    """

    kind: str
    bed: str
    number: int
    detected_s: float | None
    is_named: bool
    is_recovered: bool
    lost_steps: int
    wrong: tuple[str, ...]
    seen: str

    @property
    def is_good(self):
        """True if nothing is missing and nothing is wrong."""
        return self.is_named and self.is_recovered and not self.wrong

    def line(self):
        """One line of JSON."""
        return json.dumps(asdict(self))


class Trial:
    """A run of ``llmctl`` on a bed, and what becomes of it after a fault of a kind.

    Attributes:
        bed: where the run is.
        kind: of the fault.
        run_id: of the run.
        path: the run directory, as this machine sees it.
        host: of rank 1, once the run trains.
        problems: sentences on what is wrong.
        undo: functions without arguments that undo what the acts have done, the last one first.
        env: variables of the submission.
    """

    def __init__(self, bed, kind, number):
        self.bed, self.kind, self.number = bed, kind, number
        self.problems, self.undo, self.env, self.polls = [], [], {}, itertools.count()
        self.run_id = f"{kind.name}-{number}"
        self.path = bed.site.path(self.run_id)
        self.host = ""

    def run(self):
        """Submit, inject, wait for the end, judge."""
        kind = self.kind
        marks = ("--env", f"FAULT={kind.name}") if kind.act is None else ("--env", "HELD=1")
        restart = ("--max-restarts", str(kind.restarts), "--hang-timeout", "30")
        try:
            words = (*restart, *marks, *kind.words, *kind.prepare(self))
            self.bed.wait_until_idle()
            self.bed.submit(self.run_id, *words, env=self.env)
            return self.follow()
        finally:
            self.bed.site.call("cancel", self.run_id)
            for undo in reversed(self.undo):
                undo()
            wait_for(lambda: not ranks_of(self.path), "the end of all ranks")

    def follow(self):
        """The result of a submitted run: inject, wait until the fault is told and the run has ended, judge."""
        found, go = {}, self.path / "go"
        began = self.inject()
        if not self.kind.live:
            go.touch()
        told = self.wait_until_told(began)
        self.kind.after(self)
        go.touch()
        wait_for(lambda: self.has_ended(found), lambda: f"the end of {self.run_id}: {found}\n{self.log()}", 0.5)
        return self.judge(found, told)

    def inject(self):
        """Make the fault once the run has trained some steps; returns its time, in seconds since 1970."""
        injected = self.path / "injected"
        if self.kind.act is None:
            wait_for(lambda: injected.exists() or self.exit_of(1), lambda: f"the fault\n{self.log()}")
            self.host = self.host_of_rank_1()
            return injected.stat().st_mtime if injected.exists() else time.time()
        site = self.bed.site
        wait_for(
            lambda: site.iteration(self.run_id) > FAULT_AT or self.exit_of(1), lambda: f"{FAULT_AT} steps\n{self.log()}"
        )
        self.host = self.host_of_rank_1()
        began = time.time()
        self.kind.act(self)
        injected.touch()
        return began

    def host_of_rank_1(self):
        """Host of rank 1, as its heartbeat names it; empty if the rank has not begun."""
        path = self.path / "attempts/1/heartbeat/rank-00001.json"
        return json.loads(path.read_text())["host"] if path.exists() else ""

    def wait_until_told(self, began):
        """Seconds from the fault until the run tells it; None if the run has ended without that."""
        found = {}

        def is_told():
            found.update(exit=self.exit_of(1))
            if self.kind.live:
                # A scheduler may keep a job for a while after the end that it has recorded.
                is_over = bool(found["exit"]) and self.has_ended({})
                found.update(live=re.search(self.kind.live, self.bed.site.llmctl("status", self.run_id, "--json")))
                return bool(found["live"]) or is_over
            return bool(found["exit"]) or _HANG in self.log() or self.has_ended({})

        wait_for(is_told, lambda: f"words on the fault\n{self.log()}", 1.0 if self.kind.live else 0.1)
        seconds = time.time() - began
        if self.kind.live and not found["live"]:
            self.note(f"status never told /{self.kind.live}/")
        is_failure = self.exit_of(1).get("reason", "completed") != "completed"
        return seconds if found.get("live") or is_failure or _HANG in self.log() else None

    def has_ended(self, found):
        """True if the run has ended; ``found`` becomes its status. A llmctl takes processors from the run: few ask."""
        newest = max((int(path.name) for path in self.path.glob("attempts/*") if path.name.isdigit()), default=0)
        ending = self.exit_of(newest)
        if ending.get("restarts") or (not ending and next(self.polls) % _POLLS_BETWEEN_QUESTIONS):
            return False
        found.update(self.bed.site.status(self.run_id))
        return found["state"] not in GOING

    def note(self, problem):
        """Add a sentence on what is wrong."""
        self.problems.append(problem)

    def job_id(self):
        """Id of the run's newest job."""
        return str(self.bed.site.status(self.run_id)["job_ids"][-1])

    def exit_of(self, number):
        """exit.json of an attempt; empty before its end."""
        with suppress(OSError, ValueError):
            return json.loads((self.path / f"attempts/{number}/exit.json").read_text())
        return {}

    def log(self):
        """Log of job.sh and the supervisor."""
        texts = [path.read_text(errors="replace") for path in sorted(self.path.glob("job*.log"))]
        return "\n".join(texts)

    def logs_of(self, number):
        """Logs of the ranks and nodes of an attempt."""
        paths = sorted((self.path / f"attempts/{number}").glob("*.log"))
        return "\n".join(path.read_text(errors="replace") for path in paths)

    def judge(self, run, told_s):
        """The result of a run that has ended, by its status."""
        kind, first = self.kind, self.exit_of(1)
        causes = [str(one["cause"]) for one in run["costs"]["attempts"]] if run.get("costs") else []
        cause = next(iter(causes), "")
        hangs = [line for line in self.log().splitlines() if line.startswith(_HANG)]
        text = "\n".join([str(run.get("detail", "")), *causes, *hangs])
        is_class = not kind.classes or first.get("class") in kind.classes
        is_named = is_class and bool(re.search(kind.told.format(host=re.escape(self.host)), text))
        is_named &= bool(re.search(kind.logged, self.logs_of(1)))
        is_recovered = run["state"] == kind.end and run["attempts"] == kind.attempts
        wrong = [*self.problems, *self.wrong_culprits(cause), *self.wrong_steps(run)]
        lost = max(int(first.get("lost_steps") or 0), self.repeated_steps())
        if lost > kind.most_lost:
            wrong.append(f"{lost} steps are lost")
        seen = f"{run['state']} after {run['attempts']} attempts; class {first.get('class', '-')}; {cause[:300]}"
        detected = None if told_s is None else round(told_s, 1)
        return Result(kind.name, self.bed.name, self.number, detected, is_named, is_recovered, lost, tuple(wrong), seen)

    def wrong_culprits(self, cause):
        """A sentence if the first rank or host that a cause names is not the culprit."""
        found = _OF_RANK.search(cause)
        if "{host}" in self.kind.told and found and (found[1] not in (None, "1") or found[2] != self.host):
            return [f"'{found[0]}' is named instead of rank 1 on {self.host}"]
        return []

    def rows(self):
        """Rows of metrics.jsonl that have a loss."""
        path = self.path / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if row.get("lm_loss") is not None]

    def repeated_steps(self):
        """The most steps that an attempt has trained again; an attempt that was cut off leaves no exit.json."""
        rows, most = self.rows(), 0
        for before, row in itertools.pairwise(rows):
            if row["attempt"] > before["attempt"]:
                most = max(most, before["iteration"] - row["iteration"] + 1)
        return most

    def wrong_steps(self, run):
        """Sentences on steps that were lost beyond the newest checkpoint, and on losses of other bits."""
        rows, wrong = self.rows(), []
        for number in range(2, run["attempts"] + 1):
            began = [row["iteration"] for row in rows if row["attempt"] == number]
            saved = self.exit_of(number - 1).get("saved")
            if self.kind.is_damaged and number == 2:
                saved -= self.bed.save_interval
            if self.kind.passes_over and number == 2:
                saved = self.kind.passes_over
            if began and saved is not None and began[0] != saved + 1:
                wrong.append(f"attempt {number} began at iteration {began[0]}, after the checkpoint of {saved}")
        losses = {row["iteration"]: row["lm_loss"] for row in rows}
        others = self.bed.losses()
        different = [iteration for iteration in losses if losses[iteration] != others.get(iteration, losses[iteration])]
        if self.kind.is_same and different:
            wrong.append(f"the losses differ from iteration {min(different)} on")
        if self.kind.is_same and self.kind.end == "completed" and not others.keys() <= losses.keys():
            wrong.append(f"iterations {sorted(others.keys() - losses.keys())} are missing")
        return wrong
