"""``llmctl submit`` into a queue: stand-ins for sbatch and squeue that keep the jobs in a file.

A real Slurm, which tests/schedulers uses, cannot be made to fail in these ways on demand.
"""

import json
import os
import pty
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from llmctl.backends import load_queue_backend
from llmctl.backends.base import LOGIN, HostCommand, SubmittedJob
from llmctl.cli.main import main
from llmctl.errors import SchedulerError, SubmissionLost
from llmctl.runs.index import RunIndex
from llmctl.runs.record import RunRecord
from llmctl.submit import execute
from llmctl.submit.execute import QueueSubmission
from llmctl.transport.local import LocalTransport
from tests.llmctl.run_directories import TRANSPORT
from tests.waiting import HANG_S

SBATCH = r"""#!/bin/bash
# Stand-in for sbatch: `taken` is its queue, `outcome` names the result of each call, one per line.
here=$(dirname "$0")
pwd >>"$here/cwd"
printf '%s\n' "$*" >>"$here/argv"
outcome=$(head -n1 "$here/outcome" 2>/dev/null); sed -i 1d "$here/outcome" 2>/dev/null
failed="sbatch: error: Batch job submission failed"
case $outcome in
    busy) echo "$failed: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
    late)
        echo "$failed: Socket timed out on send/recv operation" >&2
        echo "100|PENDING|N/A||Resources|r" >"$here/late"
        exit 1 ;;
    cut) echo "$failed: Zero bytes were transmitted or received" >&2; exit 1 ;;
    refused) echo "$failed: Invalid account or account/partition combination specified" >&2; exit 1 ;;
esac
id=$((100 + $(wc -l <"$here/taken")))
name=$(sed -n 's/^#SBATCH --job-name=//p' job.sh)
if [[ $outcome != vanished ]]; then echo "$id|PENDING|N/A||Resources|$name" >>"$here/taken"; fi
case $outcome in silent|vanished) echo "sbatch: warning: something else" ;; *) echo "$id;bed" ;; esac
"""
SQUEUE = r"""#!/bin/bash
# Stand-in for squeue. A late job is in the queue after the first look.
here=$(dirname "$0")
if [[ -e $here/squeue_fails ]]; then echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; fi
cat "$here/taken"
if [[ -e $here/late ]]; then cat "$here/late" >>"$here/taken"; rm "$here/late"; fi
"""
CONFIG = {
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4},
    "training": {"train_iters": 10, "seq_length": 64, "micro_batch_size": 1, "device": "cpu"},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}
PROFILE = {
    "scheduler": "slurm",
    "group_required": True,
    "notice": "this machine closes\nin 2030",
    "resource_types": {
        "gpu": {"gpus": 8, "cores": 64, "queue": "batch", "max_nodes": 16, "points_per_hour": 1.5},
        "part": {"gpus": 1, "fraction": True},
        "cpu": {"gpus": 0, "max_node_hours": 20},
    },
    "defaults": {"resource_type": "gpu"},
    "limits": {
        "max_time": "48:00:00",
        "max_node_hours": 100,
        "time_by_nodes": [[4, "24:00:00"], [16, "12:00:00"]],
        "queues": {"debug": {"max_nodes": 2, "max_time": "0:30:00"}},
    },
    "cost": {"reserved_factor": 2.0, "priority_factors": {-10: 1.5}},
}


@pytest.fixture
def place(own_folders, monkeypatch):
    """A home with the cluster ``bed``; the working directory has ``c.yaml``, and bin has the stand-ins."""
    monkeypatch.setenv("LLMCTL_GROUP", "g1")
    monkeypatch.setattr(execute, "SEARCH_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(execute, "RETRY_PAUSES_S", (0.0, 0.0))
    write_profile(own_folders)
    (own_folders / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (own_folders / "bin" / name).write_text(text)
        (own_folders / "bin" / name).chmod(0o755)
    (own_folders / "bin/taken").touch()
    monkeypatch.setenv("PATH", f"{own_folders}/bin:/usr/bin:/bin")
    (own_folders / "work").mkdir()
    (own_folders / "work/c.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(own_folders / "work")
    return own_folders


def write_profile(place: Path, **changes) -> None:
    path = place / "config/llmctl/clusters/bed.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**PROFILE, "runs_root": f"{place}/runs", **changes}, sort_keys=False))


def submit(*arguments: str) -> int:
    return main(["submit", "--cluster", "bed", *arguments, *(() if "--" in arguments else ("--", "true"))])


def outcome(place: Path, *words: str) -> None:
    (place / "bin/outcome").write_text("".join(f"{word}\n" for word in words))


def jobs_of(place: Path, run_id: str = "r") -> list[SubmittedJob]:
    return [job for one in RunRecord.load(place / "runs" / run_id, TRANSPORT).submissions for job in one.jobs]


def queued(place: Path) -> list[str]:
    return (place / "bin/taken").read_text().splitlines()


def test_a_job_is_submitted_once_from_the_run_directory_and_its_id_is_recorded(place, capsys):
    assert submit("--run-id", "r", "--nodes", "2", "--time", "2:00:00", "--json") == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert jobs_of(place) == [SubmittedJob(LOGIN, "100")]
    assert (document["job_ids"], document["queue"]) == (["100"], "batch")
    assert document["cost"] == {
        "nodes": 2,
        "gpus_per_node": 8,
        "resource_type": "gpu",
        "hours": 2.0,
        "node_hours": 4.0,
        "points": 6.0,
        "unit": "points",
    }
    assert "asks for 2 nodes of gpu x 8 GPUs x 2 h = 4 node-hours, at most 6 points" in output.err
    settings = json.loads((place / "runs/r/job.json").read_text())
    assert (settings["points_per_node_hour"], settings["points_unit"]) == (1.5, "points")
    assert (place / "bin/cwd").read_text() == f"{place}/runs/r\n"
    assert str(place) not in (place / "bin/argv").read_text()
    assert [entry.job_ids for entry in RunIndex(place / "state/llmctl").entries()] == [("100",)]


def test_a_site_message_is_shown_once_and_again_after_a_change(place, capsys):
    shown = []
    for arguments in (["--show-script"], ["--run-id", "a"], ["--run-id", "b"]):
        assert submit(*arguments) == 0
        shown.append("this machine closes in 2030" in capsys.readouterr().err)
    write_profile(place, notice="closed")
    assert submit("--show-script") == 0
    assert [*shown, "bed: closed" in capsys.readouterr().err] == [True, True, False, True]


def test_without_a_time_the_cost_is_the_sites_default(place, capsys):
    assert submit("--show-script") == 0
    assert "1 node of gpu x 8 GPUs, for the site's default time" in capsys.readouterr().err
    assert submit("--show-script", "--time", "1:00:00", "--reservation", "R1", "--priority", "-10") == 0
    assert "at most 4.5 points" in capsys.readouterr().err
    assert not (place / "runs").exists()


def test_a_refused_job_gives_the_reason_and_leaves_nothing(place, capsys):
    outcome(place, "refused")
    assert submit("--run-id", "r") == 4
    message = capsys.readouterr().err
    assert "Invalid account or account/partition combination specified" in message
    assert "trying again" not in message
    assert not (place / "runs/r").exists()
    assert RunIndex(place / "state/llmctl").entries() == []


def test_a_missing_scheduler_says_where_to_run_and_leaves_nothing(place, monkeypatch, capsys):
    (place / "bin/sbatch").unlink()
    for name in ("sh", "bash", "python3"):
        (place / "bin" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", f"{place}/bin")
    assert submit("--run-id", "r") == 4
    assert "sbatch: is not installed on this machine, or not in PATH: run llmctl on a login" in capsys.readouterr().err
    assert not (place / "runs/r").exists()


def test_a_short_outage_of_the_scheduler_is_retried(place, capsys):
    outcome(place, "busy", "busy")
    assert submit("--run-id", "r") == 0
    assert "Unable to contact slurm controller (connect failure); trying again" in capsys.readouterr().err
    assert (len(queued(place)), jobs_of(place)) == (1, [SubmittedJob(LOGIN, "100")])


def test_a_long_outage_of_the_scheduler_leaves_nothing(place, capsys):
    outcome(place, *["busy"] * 9)
    assert submit("--run-id", "r") == 4
    assert "trying again later can help" in capsys.readouterr().err
    assert (len((place / "bin/argv").read_text().splitlines()), (place / "runs/r").exists()) == (3, False)


def test_a_submit_without_an_answer_is_not_repeated(place, capsys, monkeypatch):
    """A busy controller may accept a job after its client has stopped waiting."""
    monkeypatch.setattr(execute, "SEARCH_PAUSES_S", (0.0, 0.0))
    outcome(place, "late")
    assert submit("--run-id", "r") == 0
    assert "found it: job 100" in capsys.readouterr().err
    assert (len(queued(place)), jobs_of(place)) == (1, [SubmittedJob(LOGIN, "100")])


def test_a_run_whose_job_may_still_appear_keeps_its_directory(place, capsys):
    outcome(place, *["cut"] * 9)
    assert submit("--run-id", "r") == 4
    assert "unknown if it was submitted" in capsys.readouterr().err
    assert (len((place / "bin/argv").read_text().splitlines()), (place / "runs/r/job.sh").exists()) == (1, True)


def test_a_job_whose_id_was_not_printed_is_found_by_its_name_and_not_submitted_again(place, capsys):
    outcome(place, "silent")
    assert submit("--run-id", "r") == 0
    message = capsys.readouterr().err
    assert "searching the queue for a job called r" in message and "found it: job 100" in message
    assert (len(queued(place)), jobs_of(place)) == (1, [SubmittedJob(LOGIN, "100")])


def test_an_unknown_submit_keeps_the_run_and_resume_submits_only_a_missing_job(place, capsys):
    outcome(place, "vanished")
    assert submit("--run-id", "r") == 4
    message = capsys.readouterr().err
    assert "llmctl status r finds a submitted job" in message and "trying again later can help" in message
    assert (jobs_of(place), len((place / "bin/argv").read_text().splitlines())) == ([], 1)
    record = RunRecord.load(place / "runs/r", TRANSPORT)
    aged = [replace(one, time=one.time - 3600) for one in record.submissions]
    replace(record, submissions=tuple(aged)).save(TRANSPORT)
    (place / "bin/squeue_fails").touch()
    assert main(["resume", "r"]) in (4, 5)
    (place / "bin/squeue_fails").unlink()
    (place / "bin/taken").write_text("7|RUNNING|N/A||None|r\n")
    assert main(["resume", "r"]) == 5
    (place / "bin/taken").write_text("")
    assert main(["resume", "r"]) == 0
    assert jobs_of(place) == [SubmittedJob(LOGIN, "100")]


@dataclass(frozen=True)
class LostAnswers(LocalTransport):
    """Fake transport: every answer of sbatch is lost, as by a broken connection."""

    def run(self, argv, **more):
        result = super().run(argv, **more)
        if argv[0] == "sbatch":
            raise SchedulerError("bed: the connection was lost", transient=True, argv=argv)
        return result


def submission(place: Path, known: tuple[str, ...] = ()) -> QueueSubmission:
    (place / "runs/r").mkdir(parents=True)
    (place / "runs/r/job.sh").write_text("#SBATCH --job-name=r\n")
    transport = LostAnswers({"PATH": f"{place}/bin:/usr/bin:/bin"})
    backend = load_queue_backend("slurm")
    return QueueSubmission("r", f"{place}/runs/r", backend, transport, known, lambda _: None, lambda _: None)


def test_a_dropped_connection_is_no_reason_to_submit_twice(place):
    command = HostCommand(LOGIN, ("sbatch", "--parsable", "job.sh"))
    assert submission(place).submit(command) == SubmittedJob(LOGIN, "100")
    assert len(queued(place)) == 1


def test_the_job_of_an_earlier_submission_is_not_the_lost_one(place):
    (place / "bin/taken").write_text("55|COMPLETED|N/A||None|r\n")
    outcome(place, "vanished")
    with pytest.raises(SubmissionLost, match="unknown if it was submitted"):
        submission(place, known=("55",)).submit(HostCommand(LOGIN, ("sbatch", "--parsable", "job.sh")))
    assert len((place / "bin/argv").read_text().splitlines()) == 1


REFUSED = [
    (["--resource-type", "gpus"], 2, ["--resource-type", "no 'gpus'", "did you mean gpu?", "gpu, part, cpu"]),
    (["--gpus-per-node", "9"], 2, ["--gpus-per-node", "9 is above 8"]),
    (["--resource-type", "part", "--nodes", "2"], 2, ["--nodes", "part of a node", "whole nodes are gpu, cpu"]),
    (["--nodes", "17"], 2, ["--nodes", "17 nodes are above 16, the limit of gpu on bed"]),
    (["--nodes", "3", "--queue", "debug"], 2, ["--nodes", "above 2, the limit of queue debug"]),
    (["--time", "1:00:00", "--queue", "debug"], 2, ["--time", "1:00:00 is above 0:30:00"]),
    (["--time", "49:00:00"], 2, ["--time", "49:00:00 is above 24:00:00"]),
    (["--time", "30:00:00"], 2, ["--time", "above 24:00:00, the longest time of bed for 1 node"]),
    (["--nodes", "3", "--time", "7:00:00", "--resource-type", "cpu"], 2, ["--time", "21 node-hours, above 20, "]),
    (["--nodes", "10", "--time", "11:00:00"], 2, ["--time", "110 node-hours, above 100"]),
    (["--container", "x.sqsh"], 2, ["--container", "x.sqsh", "container.runtime"]),
    (["--mount", "/a:/b"], 2, ["--mount", "without an image"]),
    (["--priority", "5"], 2, ["--priority", "5 is above 0", "give 0 or below", "--qos=NAME in the profile's options"]),
    (["--after", "nobody"], 5, ["no run is called 'nobody'"]),
]


def test_a_default_priority_that_only_operators_may_give_is_refused(place, capsys):
    write_profile(place, defaults={"resource_type": "gpu", "priority": 5})
    assert submit("--show-script") != 0
    assert "cluster bed: defaults.priority: 5 is above 0" in capsys.readouterr().err
    assert submit("--show-script", "--priority", "0") == 0


def test_nodes_do_not_overwrite_the_saved_container_of_another(place, capsys):
    write_profile(place, container={"runtime": "pyxis", "save": "/shared/changed.sqsh"})
    assert submit("--show-script", "--nodes", "2", "--container", "repo/image") == 2
    assert "--nodes: " in (message := capsys.readouterr().err) and "container.save" in message
    assert submit("--show-script", "--container", "repo/image") == 0


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_requests_above_the_sites_limits_are_refused_before_the_queue(place, capsys, arguments, code, message):
    assert submit(*arguments) == code
    err = capsys.readouterr().err
    assert [words for words in message if words not in err] == []
    assert not (place / "bin/argv").exists()
    assert not (place / "runs").exists()


@pytest.mark.usefixtures("place")
def test_a_reservation_has_separate_limits(capsys):
    assert submit("--show-script", "--nodes", "32", "--time", "200:00:00", "--reservation", "R1") == 0
    assert submit("--show-script", "--reservation", "R1", "--nodes", "2", "--resource-type", "part") == 2
    assert "part of a node" in capsys.readouterr().err


def test_a_missing_group_names_the_three_ways(place, capsys, monkeypatch):
    monkeypatch.delenv("LLMCTL_GROUP")
    assert submit() == 3
    message = capsys.readouterr().err
    assert all(way in message for way in ("--group", "LLMCTL_GROUP", f"{place}/config/llmctl/clusters/bed.yaml"))
    assert submit("--show-script", "--group", "g2") == 0


def test_after_waits_for_a_known_job_and_for_none_that_has_ended(place, capsys):
    assert submit("--run-id", "first") == 0
    assert submit("--run-id", "second", "--after", "first") == 0
    assert "#SBATCH --dependency=afterok:100" in (place / "runs/second/job.sh").read_text()
    assert submit("--run-id", "third", "--after", "any:first") == 0
    assert "#SBATCH --dependency=afterany:100" in (place / "runs/third/job.sh").read_text()
    assert (submit("--after", "any:"), submit("--after", "any:nobody")) == (2, 5)
    folder = place / "runs/first/attempts/1"
    folder.mkdir(parents=True)
    (folder / "started.json").write_text(json.dumps({"attempt": 1, "submission": 1, "host": "n1", "time": 1.0}))
    for reason, code in (("completed", 0), ("failed", 2)):
        end = {"code": 0 if code == 0 else 3, "reason": reason, "signal": None, "time": 2.0, "node": "n1"}
        (folder / "exit.json").write_text(json.dumps(end))
        capsys.readouterr()
        assert submit("--show-script", "--after", "first") == code
        assert submit("--after", "first") == code
    assert "did not complete" in (message := capsys.readouterr().err) and "--after any:first" in message
    assert submit("--show-script", "--after", "any:first") == 0
    assert "--dependency" not in capsys.readouterr().out
    assert submit("--cluster", "local", "--after", "first") == 2


TWO_NODES = ("--cluster", "bed", "--nodes", "2", "--set", "training.device=cpu")


def answered(place: Path, answer: str) -> tuple[int, str]:
    """Exit code and messages of ``llmctl submit`` without a CONFIG, on a terminal where a user answers."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "llmctl.cli.main", "submit", *TWO_NODES]
    with subprocess.Popen(argv, stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs, cwd=place / "work") as process:
        os.close(theirs)
        seen = b""
        with suppress(OSError):  # EIO when the other end is closed
            while part := os.read(ours, 65536):
                seen += part
                if b"[y/N]" in part:
                    os.write(ours, answer.encode() + b"\n")
        code = process.wait(HANG_S)
    os.close(ours)
    return code, seen.decode()


def test_the_bundled_example_goes_to_a_queue_only_if_it_is_meant(place, capsys):
    job = "bed: 2 nodes of gpu, for the site's default time"
    assert main(["submit", *TWO_NODES]) == 2
    refusal = f"none is given, and the bundled example would go to {job}; name a config, or give --example"
    assert refusal in capsys.readouterr().err
    code, seen = answered(place, "n")
    assert (code, "nothing was submitted" in seen) == (2, True)
    assert f"train the bundled example on {job}? [y/N]" in seen
    assert not (place / "runs").exists()
    code, seen = answered(place, "y")
    assert code == 0, seen
    assert main(["submit", *TWO_NODES, "--example"]) == 0
    assert len(list((place / "runs").glob("gpt-small-*"))) == 2
    assert main(["submit", *TWO_NODES, "--dry-run"]) == 0
    Path("c.yaml").rename("llmctl.yaml")
    assert main(["submit", *TWO_NODES]) == 0
    assert main(["submit", "--cluster", "bed", "--example", "--", "true"]) == 2
