"""``llmctl resume``: only ended runs, from the latest checkpoint, into the same run directory."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from llmctl.backends import load_backend
from llmctl.cli.main import main
from llmctl.context import ClusterSession, Context
from llmctl.errors import RecordError, UsageError
from llmctl.operate.resume import StartPoint, check_ended, check_work_left, start_point
from llmctl.runs.index import RunIndex
from llmctl.runs.record import RunRecord
from llmctl.site.profile import ClusterProfile
from llmctl.submit.job import SubmitArguments
from llmctl.submit.plan import plan_submission
from llmctl.submit.plan_resume import plan_resume
from llmctl.transport.local import LocalTransport
from llmctl.transport.processes import identify, processes_of_run
from llmctl.transport.protocol import CommandResult
from tests.llmctl.run_directories import leave, make_run, recycled
from tests.waiting import HANG_S, wait_for

TRANSPORT = LocalTransport({})
SESSION = ClusterSession(ClusterProfile(name="local", scheduler="local"), TRANSPORT, None)


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "10000"], start_new_session=True)
    yield identify(process.pid)
    process.kill()
    process.wait(HANG_S)


def submit(name, script):
    """Submit a COMMAND; returns the run directory."""
    assert main(["submit", "--name", name, "--", "bash", "-c", script]) == 0


def wait_until_ended(run_dir, attempt):
    wait_for((run_dir / "attempts" / str(attempt) / "exit.json").exists, f"the end of attempt {attempt}")


@pytest.mark.parametrize("patience_s", [0.0, 0.1, 0.3])
def test_a_cancel_right_after_submit_ends_the_run_as_cancelled(home, capsys, patience_s):
    submit("hasty", "sleep 10000")
    run_id = capsys.readouterr().out.strip()
    time.sleep(patience_s)
    assert main(["cancel", "hasty", "--grace", "5"]) == 0
    assert capsys.readouterr().out.startswith(f"{run_id}: cancelled")
    assert processes_of_run(str(home / "runs" / run_id)) == []


def test_a_command_runs_again_in_the_same_directory(home, capsys):
    submit("twice", "echo attempt $LLMCTL_ATTEMPT; exit 3")
    run_id = capsys.readouterr().out.strip()
    run_dir = home / "runs" / run_id
    wait_until_ended(run_dir, 1)
    assert main(["resume", "twice", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["run_id"], document["resumes_from"]) == (run_id, None)
    assert "runs its command again" in err
    wait_until_ended(run_dir, 2)
    assert (run_dir / "attempts" / "2" / "node-00000.log").read_text() == "attempt 2\n"
    record = RunRecord.load(run_dir, TRANSPORT)
    assert [submission.number for submission in record.submissions] == [1, 2]
    assert document["job_ids"] == [record.submissions[-1].jobs[0].job_id]
    assert json.loads((run_dir / "attempts" / "2" / "started.json").read_text())["submission"] == 2


def test_a_command_runs_again_in_its_first_working_directory(home, capsys, monkeypatch):
    submit("there", "pwd")
    run_dir = home / "runs" / capsys.readouterr().out.strip()
    wait_until_ended(run_dir, 1)
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    assert main(["resume", "there"]) == 0
    wait_until_ended(run_dir, 2)
    assert (run_dir / "attempts" / "2" / "node-00000.log").read_text() == f"{home}\n"


def test_work_of_version_0_2_0_finds_its_trainer_again(home, capsys):
    program = 'echo $LLMCTL_ATTEMPT\nexec "$0" -m trainer --help "$@"'
    assert main(["submit", "--name", "old", "--", "bash", "-c", program, sys.executable]) == 0
    run_dir = home / "runs" / capsys.readouterr().out.strip()
    wait_until_ended(run_dir, 1)
    for attempt in ("2", "3"):
        assert main(["resume", "old"]) == 0
        wait_until_ended(run_dir, int(attempt))
        assert "Usage: python -m trainer" in (run_dir / "attempts" / attempt / "node-00000.log").read_text()


def test_a_run_does_not_continue_with_other_code(home, capsys):
    submit("once", "true")
    run_dir = home / "runs" / capsys.readouterr().out.strip()
    wait_until_ended(run_dir, 1)
    shutil.rmtree(home / "runs" / f".llmctl-{os.geteuid()}" / "code")
    assert main(["resume", "once"]) == 5
    assert "the snapshot of the run's trainer is missing" in capsys.readouterr().err
    assert not (run_dir / "attempts" / "2").exists()


def test_resume_of_a_running_run_is_refused_with_its_job(home, capsys):
    submit("busy", "echo begun; sleep 10000")
    run_id = capsys.readouterr().out.strip()
    wait_for((home / "runs" / run_id / "attempts" / "1" / "node-00000.log").exists, "the command")
    record = RunRecord.load(home / "runs" / run_id, TRANSPORT)
    assert main(["resume", "busy"]) == 5
    err = capsys.readouterr().err
    assert f"is still running (job {record.submissions[-1].jobs[0].job_id} on localhost)" in err
    assert f"llmctl cancel {run_id}" in err
    assert main(["cancel", "busy", "--grace", "5"]) == 0
    assert capsys.readouterr().out == f"{run_id}: cancelled\n"
    exit_file = json.loads((home / "runs" / run_id / "attempts" / "1" / "exit.json").read_text())
    assert exit_file["reason"] == "cancelled"
    assert RunRecord.load(home / "runs" / run_id, TRANSPORT).submissions[-1].number == 1


def test_a_dry_run_prints_the_script_and_writes_nothing(home, capsys):
    submit("dry", "true")
    run_dir = home / "runs" / capsys.readouterr().out.strip()
    wait_until_ended(run_dir, 1)
    before = sorted(path.relative_to(run_dir) for path in run_dir.rglob("*"))
    assert main(["resume", "dry", "--show-script"]) == 0
    out = capsys.readouterr().out
    assert ", submission 2. Written by" in out
    assert out.startswith("#!")
    assert sorted(path.relative_to(run_dir) for path in run_dir.rglob("*")) == before
    assert main(["resume", "dry", "--show-script", "--nodes", "3"]) == 0
    assert "node < 3;" in capsys.readouterr().out


def test_settings_are_checked_as_in_submit(home, capsys):
    submit("checked", "true")
    wait_until_ended(home / "runs" / capsys.readouterr().out.strip(), 1)
    assert main(["resume", "checked", "--set", "training.train_iters=3"]) == 2
    assert "only job.*" in capsys.readouterr().err
    assert main(["resume", "checked", "--set", "job.nods=3"]) == 2
    assert "nodes" in capsys.readouterr().err
    assert main(["resume", "checked", "--nodes", "0"]) == 2


def test_following_gives_the_exit_code_of_the_followed_run(home, capsys):
    submit("followed", "exit 4")
    wait_until_ended(home / "runs" / capsys.readouterr().out.strip(), 1)
    assert main(["resume", "followed", "--follow"]) == 6
    assert "ended with exit code 4" in capsys.readouterr().err


def test_secrets_must_be_given_again(home, capsys, monkeypatch):
    monkeypatch.setenv("TEST_TOKEN", "hidden-value")
    assert main(["submit", "--name", "sec", "--secret", "TEST_TOKEN", "--", "bash", "-c", 'echo "${#TEST_TOKEN}"']) == 0
    run_dir = home / "runs" / capsys.readouterr().out.strip()
    wait_until_ended(run_dir, 1)
    monkeypatch.delenv("TEST_TOKEN")
    assert main(["resume", "sec"]) == 2
    assert "TEST_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("TEST_TOKEN", "s3cret!")
    assert main(["resume", "sec"]) == 0
    wait_until_ended(run_dir, 2)
    assert (run_dir / "attempts" / "2" / "node-00000.log").read_text() == "7\n"
    assert "s3cret!" not in "".join(path.read_text(errors="replace") for path in run_dir.rglob("*") if path.is_file())


def test_two_resumes_at_once_start_one_job(home, capsys):
    submit("once", "true")
    run_dir = home / "runs" / capsys.readouterr().out.strip()
    wait_until_ended(run_dir, 1)
    with TRANSPORT.lock(f"{run_dir}/.lock"):
        assert main(["resume", "once"]) == 5
    assert "by another llmctl" in capsys.readouterr().err


def test_the_run_starts_from_the_latest_checkpoint(tmp_path):
    run = make_run(tmp_path, train_iters=600)
    assert "starts from the beginning: no checkpoint in" in start_point(run.record, SESSION).sentence
    checkpoints = run.path / "checkpoints"
    for name in ("iter_0000300", "iter_0000500", ".iter_0000550.tmp-1"):
        (checkpoints / name).mkdir(parents=True)
    assert start_point(run.record, SESSION).iteration == 500, "the pointer was lost: the newest complete one"
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("300\n")
    point = start_point(run.record, SESSION)
    assert (point.iteration, point.sentence) == (300, "resumes from iteration 300 of 600")
    check_work_left(run.record, point)
    with pytest.raises(UsageError, match="--set training.train_iters=N"):
        check_work_left(run.record, StartPoint(600, ""))


class LoginNode(LocalTransport):
    """This machine with a chosen kind of file system."""

    kind = "ext4"

    def run(self, argv, **_):
        assert argv[:2] == ["df", "-PTk"]
        return CommandResult(0, f"Filesystem Type ...\nsource {self.kind} 100 50 50 50% /data\n", "")


def test_saved_progress_without_a_checkpoint_is_refused_where_the_folder_can_be_seen(tmp_path):
    run = make_run(tmp_path, train_iters=600)
    folder = tmp_path / "data" / "ckpt"
    run.record.config["checkpoint"] = {"save": str(folder), "save_interval": 100}
    run.metrics(100)
    assert "starts from the beginning" in start_point(run.record, SESSION).sentence, "the first save never ended"
    run.metrics(101)
    with pytest.raises(
        RecordError, match=f"checkpoint folder {folder} does not exist on this machine, but the run has"
    ):
        start_point(run.record, SESSION)
    (run.path / "saved.json").write_text(json.dumps({"iteration": None}))
    assert "starts from the beginning" in start_point(run.record, SESSION).sentence
    (run.path / "saved.json").write_text(json.dumps({"iteration": 100, "folder": str(folder)}))
    login = LoginNode({})
    queue = ClusterSession(SESSION.profile, login, load_backend("slurm"))
    point = start_point(run.record, queue)
    assert point.iteration is None
    assert point.sentence == (
        f"resumes from iteration 100 of 600, if the job finds it: {folder} is on ext4 here, so that the nodes may see "
        "other files; the job looks there and waits"
    )
    login.kind = "nfs4"
    folder.mkdir(parents=True)
    with pytest.raises(RecordError, match="is empty on this machine"):
        start_point(run.record, queue)
    login.kind = "ext4"
    run.record.config["checkpoint"]["save"] = None
    with pytest.raises(RecordError, match=f"{run.path}/checkpoints does not exist on this machine"):
        start_point(run.record, queue)


@pytest.mark.usefixtures("frozen_time")
def test_a_run_that_may_not_have_ended_is_refused(tmp_path, sleeper):
    run = make_run(tmp_path).submit(sleeper)
    run.start_attempt(host="elsewhere", boot_id="other", pid_start_time=1)
    check = make_run(tmp_path, "b-1").submit(recycled(sleeper))
    leave(check.start_attempt(), "failed", 1)
    check_ended(check.record, SESSION)
    with pytest.raises(RecordError, match="still running"):
        check_ended(run.record, SESSION)
    unstarted = make_run(tmp_path, "c-1").submit(None, age_s=3600)
    check_ended(unstarted.record, SESSION)
    with pytest.raises(RecordError, match="pending"):
        check_ended(make_run(tmp_path, "d-1").submit(None, age_s=1).record, SESSION)


def test_a_run_with_checkpoints_of_its_own_goes_on_without_its_start_point(home, capsys):
    config = {"model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}, "data": {"mock_data": True}}
    config |= {"training": {"train_iters": 2, "seq_length": 8, "device": "cpu"}, "optimizer": {"lr": 1e-3}}
    (home / "c.yaml").write_text(json.dumps(config))
    words = ["submit", "c.yaml", "--cluster", "local", "--follow"]
    assert main([*words, "--run-id", "first", "--set", f"checkpoint.save={home}/start"]) == 0
    load = ["--set", f"checkpoint.load={home}/start", "--set", "training.train_iters=3"]
    assert main([*words, "--run-id", "second", *load]) == 0
    shutil.rmtree(home / "start")
    assert main(["resume", "second", "--follow", "--set", "training.train_iters=4"]) == 0
    rows = [json.loads(line) for line in (home / "runs/second/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "lm_loss" in row] == [3, 4]
    shutil.rmtree(home / "runs/second/checkpoints")
    assert main(["resume", "second", "--set", "training.train_iters=5"]) == 3
    assert f"checkpoint.load: there is no {home}/start" in capsys.readouterr().err


def test_an_unknown_run_is_refused_with_the_known_runs(home, capsys, sleeper):
    RunIndex(home / "state" / "llmctl").add(make_run(home / "runs", "alpha-1").submit(sleeper).record)
    assert main(["resume", "beta"]) == 5
    assert "alpha-1" in capsys.readouterr().err


def test_a_run_of_an_older_llmctl_gets_no_keys_that_its_code_does_not_know(home):
    """The code of a run is that of its first submission, and refuses keys that came later."""
    config = {"model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}, "data": {"mock_data": True}}
    config["training"] = {"train_iters": 3, "seq_length": 8, "micro_batch_size": 1}
    config["optimizer"] = {"lr": 1e-3}
    (home / "c.yaml").write_text(json.dumps(config))
    context = Context.of((), (), dict(os.environ), home)
    record = plan_submission(context, SubmitArguments(config="c.yaml", cluster="local", run_id="old")).record
    assert record.config is not None
    old = {section: dict(values) for section, values in record.config.items() if section != "evaluation"}
    del old["checkpoint"]["wait_for_folder_s"], old["training"]["skipped_steps_window"]
    plan = plan_resume(context, replace(record, config=old), settings=["training.train_iters=7"], dry_run=True)
    assert plan.record.config == {**old, "training": {**old["training"], "train_iters": 7}}
    asked = ["checkpoint.wait_for_folder_s=5"]
    new = plan_resume(context, replace(record, config=old), settings=asked, dry_run=True).record.config
    assert new == {**old, "checkpoint": {**old["checkpoint"], "wait_for_folder_s": 5.0}}
    same = plan_resume(context, record, dry_run=True).record.config
    assert same == record.config


def test_removed_kernel_backends_of_an_older_llmctl_become_auto(home):
    config = {"model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}, "data": {"mock_data": True}}
    config |= {"training": {"train_iters": 3, "seq_length": 8}, "optimizer": {"lr": 1e-3}}
    (home / "c.yaml").write_text(json.dumps(config))
    context = Context.of((), (), dict(os.environ), home)
    record = plan_submission(context, SubmitArguments(config="c.yaml", cluster="local", run_id="old")).record
    backends = {"kernel_backend": "nvrtc", "kernel_backends": {"rope": "compile", "rms_norm": "native"}}
    old = replace(record, config={**record.config, "training": {**record.config["training"], **backends}})
    plan = plan_resume(context, old, dry_run=True)
    auto = {"kernel_backend": "auto", "kernel_backends": {"rope": "auto", "rms_norm": "native"}}
    assert plan.record.config == {**record.config, "training": {**record.config["training"], **auto}}
    assert [warning for warning in plan.warnings if "auto" in warning] == [
        "training.kernel_backend: nvrtc, of an earlier release, is taken as auto",
        "training.kernel_backends.rope: compile, of an earlier release, is taken as auto",
    ]
    with pytest.raises(UsageError, match=r"--set training.kernel_backend: 'compile' is not valid: this backend was"):
        plan_resume(context, old, settings=["training.kernel_backend=compile"], dry_run=True)


def test_a_job_of_a_newer_llmctl_is_refused(home):
    made = make_run(home / "runs", "a-1").submit(None)
    record = replace(made.record, job={**made.record.job, "budget": 3}, llmctl_version="9.1")
    context = Context.of((), (), dict(os.environ), home)
    with pytest.raises(
        RecordError, match=r"run\.json: .* does not know this key of the record: job\.budget; use llmctl 9"
    ):
        plan_resume(context, record, dry_run=True)
