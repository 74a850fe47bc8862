"""Chains of jobs: the decision as a table, and the claims and hand-overs of jobs with real processes."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from llmctl.supervisor.attempt import AttemptError, NotNeededError, claim_submission
from llmctl.supervisor.chain.decision import JobEnd, Used, last_job_reason, read_used
from llmctl.supervisor.chain.links import cancelled_name, claim_name, link_name, passed_name
from llmctl.supervisor.restarts import Reached
from llmctl.supervisor.settings import ChainSettings, JobSettings
from tests.llmctl.supervisor.test_supervisor import ending, run_job, settings, start
from tests.waiting import HANG_S

ON = ("killed", "lost_peer")
SECRET = b"TOKEN\0hidden\0"
SLEEP = 'touch "$LLMCTL_HOSTFILE"; exec sleep 600\n'
"""A COMMAND that goes on until the time limit of the job."""


def reached(*pairs: tuple[int, int]) -> tuple[Reached, ...]:
    return tuple(Reached(number, *pair) for number, pair in enumerate(pairs, 1))


def chained(run_dir: Path, **limits: object) -> tuple[JobSettings, ChainSettings]:
    chain = ChainSettings(("true",), 3600)._replace(**limits)
    more = {
        "is_training": True,
        "nodes": 2,
        "restart_on": ON,
        "points_per_node_hour": 1.5,
        "points_unit": "ABCI points",
    }
    return settings(run_dir, **more, chain=chain), chain


@pytest.mark.parametrize(
    ("limits", "end", "expected"),
    [
        ({}, JobEnd("timeout", "", reached((10, 10)), Used(99, 99)), ""),
        ({}, JobEnd("failed", "killed", reached((10, 5)), Used(1, 1)), ""),
        ({}, JobEnd("timeout", "", reached((10, 10), (10, 10)), Used(1, 1)), ""),
        ({}, JobEnd("failed", "config", reached((10, 10)), Used(1, 1)), "a new attempt would meet the same error"),
        ({}, JobEnd("failed", "disk", reached((10, 10)), Used(1, 1)), "the disk is full, or a quota is used up"),
        ({}, JobEnd("failed", "not_finite", reached((9, 9)), Used(1, 1)), "not_finite is not one of job.restart_on"),
        (
            {},
            JobEnd("timeout", "", reached((10, 10), (10, 10), (9, 10)), Used(1, 1)),
            "attempts 2 and 3 have trained and saved nothing beyond iteration 10",
        ),
        ({"until": 11}, JobEnd("timeout", "", reached((11, 10)), Used(1, 1)), ""),
        (
            {"until": 10},
            JobEnd("timeout", "", reached((11, 10)), Used(1, 1)),
            "iteration 10 is saved, and job.chain.until is 10",
        ),
        ({"node_hours": 4}, JobEnd("timeout", "", reached((1, 1)), Used(2, 3)), ""),
        (
            {"node_hours": 4},
            JobEnd("timeout", "", reached((1, 1)), Used(2.5, 3)),
            "the run has used 2.5 node-hours, the next job may use 2 more, and job.chain.node_hours is 4",
        ),
        ({"points": 6}, JobEnd("timeout", "", reached((1, 1)), Used(2, 3)), ""),
        (
            {"points": 5},
            JobEnd("failed", "killed", reached((1, 1)), Used(2, 3)),
            "the run has used 3 ABCI points, the next job may use 3 more, and job.chain.points is 5",
        ),
    ],
)
def test_the_last_job_of_a_chain(tmp_path, limits, end, expected):
    found = last_job_reason(*chained(tmp_path, **limits), end)
    assert found.startswith(expected) and bool(found) == bool(expected), found


def test_a_command_goes_on_only_after_its_time_limit(tmp_path):
    job, chain = chained(tmp_path)
    job = job._replace(is_training=False)
    assert last_job_reason(job, chain, JobEnd("timeout", "", reached((0, 0), (0, 0), (0, 0)), Used(1, 1))) == ""
    assert "COMMAND" in last_job_reason(job, chain, JobEnd("failed", "killed", reached((0, 0)), Used(1, 1)))


def test_the_time_of_all_attempts_counts(tmp_path):
    def write(attempt: int, **files: dict[str, object]) -> None:
        folder = tmp_path / f"attempts/{attempt}"
        folder.mkdir(parents=True)
        for name, values in files.items():
            (folder / f"{name}.json").write_text(json.dumps(values))

    # Of an earlier submission with other nodes; killed, with a last sign of life; the one that ends now.
    write(1, started={"time": 0}, exit={"time": 3600}, job={"nodes": 4, "points_per_node_hour": 2.0})
    write(2, started={"time": 4000}, alive={"time": 5800}, job={"nodes": 2, "points_per_node_hour": 1.0})
    write(3, started={"time": 7200}, job={"nodes": 2, "points_per_node_hour": 1.0})
    assert read_used(chained(tmp_path)[0], 3, 9000.0) == Used(4 + 1 + 1, 8 + 1 + 1)


def test_a_link_begins_once_the_job_before_has_passed_the_run_on(tmp_path):
    job, _ = chained(tmp_path)
    attempts = tmp_path / "attempts"
    assert [claim_submission(job, "7"), claim_submission(job, "7")] == [1, 1]
    with pytest.raises(NotNeededError, match="job 7 already is submission 1 of r; job 8 starts nothing"):
        claim_submission(job, "8")
    (attempts / passed_name(1, 1)).touch()
    assert [claim_submission(job, "8"), claim_submission(job, "8")] == [2, 2]
    assert (attempts / claim_name(1, 2)).readlink() == Path("8")
    # The scheduler has taken the next job twice, or starts the first one again.
    with pytest.raises(NotNeededError, match="job 8 already is submission 1 of r, link 2 of its chain; job 9 starts"):
        claim_submission(job, "9")
    with pytest.raises(NotNeededError, match="job 7 has passed r on to its next job and starts nothing"):
        claim_submission(job, "7")
    (attempts / passed_name(1, 2)).touch()
    assert claim_submission(job, "9") == 3
    # Without a chain nobody passes anything on.
    with pytest.raises(AttemptError, match="job 7 already is submission 1 of r; job 8"):
        claim_submission(job._replace(chain=None), "8")


def test_no_link_begins_after_a_cancel_or_a_resume(tmp_path):
    job, _ = chained(tmp_path, argv=("true",))
    secrets = tmp_path / "secrets"
    secrets.write_bytes(SECRET)
    job = job._replace(secrets_file=str(secrets))
    assert claim_submission(job, "7") == 1
    (tmp_path / "attempts" / passed_name(1, 1)).touch()
    (tmp_path / "attempts" / cancelled_name(1)).touch()
    with pytest.raises(NotNeededError, match="r was cancelled; job 8 starts nothing"):
        claim_submission(job, "8")
    assert not secrets.exists()
    assert claim_submission(job._replace(submission=2), "9") == 1
    with pytest.raises(NotNeededError, match="submitted again since .submission 2."):
        claim_submission(job, "8")


def answering(folder: Path, script: str) -> dict[str, object]:
    """A chain whose submit command is a script of the shell; each call leaves a line in ``calls``."""
    text = f"echo $$ >>{shlex.quote(str(folder))}/calls; {script}"
    return {"argv": ["sh", "-c", text], "time_s": 60}


def test_a_job_passes_the_run_on_after_its_time_limit(tmp_path):
    """The next job is job.sh again; a second next job starts nothing, with exit code 0."""
    run_dir, secrets = tmp_path / "run", tmp_path / "secrets"
    secrets.write_bytes(SECRET)
    secrets.chmod(0o600)
    job = run_job(
        run_dir,
        SLEEP,
        stop_after_s=1,
        stop_grace_s=1,
        secrets_file=str(secrets),
        chain=answering(tmp_path, "echo Submitted batch job 8"),
    )
    assert job.wait(HANG_S) == 143
    first, link = ending(run_dir), json.loads((run_dir / "attempts" / link_name(1, 1)).read_text())
    assert (first["reason"], first["passes_on"]) == ("timeout", True)
    assert (link["link"], link["said"]) == (2, "Submitted batch job 8\n")
    assert secrets.read_bytes() == SECRET
    assert json.loads((run_dir / "attempts/1/started.json").read_text())["link"] == 1
    # The job before, which its scheduler starts again.
    again = start(run_dir)
    assert again.wait(HANG_S) == 0 and not (run_dir / "attempts/2").exists()
    script = (run_dir / "job.sh").read_text().replace("--job-id 7", "--job-id ${ID}")
    jobs = []
    for job_id in ("8", "9"):
        (run_dir / f"job-{job_id}.sh").write_text(script.replace("${ID}", job_id))
        jobs.append(started_by(run_dir / f"job-{job_id}.sh"))
    codes = sorted(job.wait(HANG_S) for job in jobs)
    assert codes == [0, 143] and not (run_dir / "attempts/3").exists()
    assert json.loads((run_dir / "attempts/2/started.json").read_text())["link"] == 2
    assert (run_dir / "attempts" / link_name(1, 2)).exists()


def started_by(script: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(["bash", str(script), ""], text=True, stderr=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        ({"argv": ["/no/such/sbatch"], "time_s": 60}, "/no/such/sbatch on .*: No such file or directory"),
        ({"argv": ["sh", "-c", "echo no credits >&2; exit 4"], "time_s": 60}, r"no credits \(exit code 4 on .*\)"),
        ({"argv": ["true"], "time_s": 7200, "node_hours": 1}, "used .* node-hours, the next job may use 2 more"),
    ],
)
def test_a_next_job_that_cannot_be_submitted(tmp_path, chain, words):
    run_dir, secrets = tmp_path / "run", tmp_path / "secrets"
    secrets.write_bytes(SECRET)
    job = run_job(run_dir, SLEEP, stop_after_s=1, stop_grace_s=1, secrets_file=str(secrets), chain=chain)
    _, errors = job.communicate(timeout=HANG_S)
    end = ending(run_dir)
    assert end["reason"] == "timeout" and not end.get("passes_on"), end
    assert re.search(words, end["not_chained"]) and re.search(words, errors), (end, errors)
    assert not secrets.exists() and not (run_dir / "attempts" / link_name(1, 1)).exists()


@pytest.mark.parametrize("script", ['touch "$LLMCTL_HOSTFILE"; exit 3\n', "kill -TERM $PPID; wait\n"])
def test_a_failure_of_a_command_and_a_stop_end_the_chain(tmp_path, script):
    run_dir = tmp_path / "run"
    job = run_job(run_dir, script, chain=answering(tmp_path, "echo 8"))
    job.communicate(timeout=HANG_S)
    assert not ending(run_dir).get("passes_on") and not (tmp_path / "calls").exists()


def test_no_job_follows_a_cancelled_one(tmp_path):
    run_dir = tmp_path / "run"
    script = f'touch "$LLMCTL_RUN_DIR/attempts/{cancelled_name(1)}"; {SLEEP}'
    run_job(run_dir, script, stop_after_s=1, stop_grace_s=1, chain=answering(tmp_path, "echo 8")).communicate()
    assert ending(run_dir)["not_chained"] == "the run was cancelled" and not (tmp_path / "calls").exists()


def test_a_job_that_begins_after_its_time_limit_ends_the_chain(tmp_path):
    """Else a site whose prolog is too slow would get one job after another, each of which uses up its limit."""
    run_dir = tmp_path / "run"
    chain = {**answering(tmp_path, "echo 8"), "node_hours": 9}
    run_job(run_dir, SLEEP, "--end-time", "1000000000", chain=chain).communicate(timeout=HANG_S)
    end = ending(run_dir)
    assert (end["reason"], end["not_chained"]) == (
        "timeout",
        "the job began after its time limit, as the next one might",
    )
    assert not (tmp_path / "calls").exists()
