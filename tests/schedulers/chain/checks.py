"""Chains of jobs on a real scheduler: checks that hold for each of them."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.schedulers.slurm_site import Site
from tests.waiting import wait_for

# A training whose length in seconds does not depend on the machine.
SLOW = ("--env", "PACE_S=2", "--set", "checkpoint.save_interval=10000")
ENDLESS = ("--", "sleep", "3600")


def started(site: Site, run_id: str) -> list[dict[str, Any]]:
    """started.json of all attempts of a run."""
    # Claims are links to the ids of jobs, which may be the names of attempts too.
    found = [file for file in site.path(run_id).glob("attempts/*/started.json") if file.parent.name.isdigit()]
    files = sorted(found, key=lambda file: int(file.parent.name))
    return [json.loads(file.read_text()) for file in files]


def check_to_the_end(site: Site, run_id: str, *how: str, cluster: str) -> None:
    """Train for longer than two jobs may last: the chain goes on to the last iteration, and each job begins once.

    Args:
        site: of the scheduler.
        run_id: of the new run.
        how: size of a job of two minutes, of which half are for the training.
        cluster: profile.
    """
    length = ("--set", "training.train_iters=60", "--chain", "until=60,node_hours=9", "--time", "2m")
    site.submit(run_id, *how, *length, *SLOW, cluster=cluster)
    run: dict[str, Any] = {"state": "pending", "iteration": 0}
    while run["state"] in ("pending", "running"):
        # One wait for the whole chain would be a limit on its time.
        run = site.wait_until(run_id, partial(_has_moved, since=run["iteration"] or 0))
    log = f"{run}\n{site.job_log(run_id)}"
    assert run["state"] == "completed" and run["iteration"] == 60, log
    begun = started(site, run_id)
    assert len(begun) >= 3 and [one["link"] for one in begun] == [*range(1, len(begun) + 1)], log
    assert len({one["job_id"] for one in begun}) == len(begun) and {one["submission"] for one in begun} == {1}
    assert run["job_ids"][-1] == begun[-1]["job_id"]
    rows = map(json.loads, (site.path(run_id) / "metrics.jsonl").read_text().splitlines())
    # Each job has saved at its limit, so that no iteration is trained twice.
    assert [row["iteration"] for row in rows if "lm_loss" in row] == [*range(1, 61)]
    assert not list(site.path(run_id).glob("own/secrets/*"))


def _has_moved(run: dict[str, Any], since: int) -> bool:
    return run["state"] not in ("pending", "running") or (run["iteration"] or 0) >= since + 5


def check_budget(site: Site, run_id: str, *how: str, cluster: str) -> None:
    """A limit on node-hours that the first job leaves too little of ends the chain, and ``status`` says so."""
    site.submit(run_id, *how, "--time", "2m", "--chain", "node_hours=0.04", *ENDLESS, cluster=cluster)
    run = site.ended(run_id)
    assert (run["state"], run["attempts"]) == ("timeout", 1), run
    words = r"the chain of jobs has ended: the run has used 0\.0\d+ node-hours, the next job may use 0\.0333\d* more, "
    assert re.search(words + r"and job\.chain\.node_hours is 0\.04", run["detail"]), run


def check_cancel(site: Site, run_id: str, *how: str, cluster: str, hold: Callable[[bool], object]) -> None:
    """Cancel a run whose next job waits: nothing is left in the queue, and nothing begins.

    Args:
        site: of the scheduler.
        run_id: of the new run.
        how: size of a job.
        cluster: profile.
        hold: lets no job begin, or lets jobs begin again.
    """
    site.submit(run_id, *how, "--time", "2m", "--chain", "node_hours=9", *ENDLESS, cluster=cluster)
    wait_for(lambda: started(site, run_id), lambda: site.scheduler_report())
    hold(True)
    try:
        run = site.wait_until(run_id, lambda run: "link 2 of the chain" in run["detail"])
        job_id = run["job_ids"][-1]
        assert run["state"] == "pending" and run["detail"].startswith(f"link 2 of the chain, job {job_id}, pending"), (
            run
        )
        assert site.queue(job_id) and job_id != run["job_ids"][0]
        refused = site.call("resume", run_id)
        assert refused.returncode == 5 and "is still pending" in refused.stderr, refused.stderr
        waits = site.call("submit", "--cluster", cluster, *how, "--after", run_id, "--", "true")
        assert waits.returncode == 2 and "goes on in further jobs" in waits.stderr, waits.stderr
        said = site.llmctl("cancel", run_id)
        assert f"cancelled before link 2 of the chain, job {job_id}, began" in said, said
        assert not any("PENDING" in line or " qw " in line for line in site.queue(job_id))
    finally:
        hold(False)
    assert site.status(run_id)["state"] == "cancelled" and len(started(site, run_id)) == 1
    assert (site.path(run_id) / "attempts/.cancelled-1").exists()
