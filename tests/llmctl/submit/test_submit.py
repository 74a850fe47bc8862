"""``llmctl submit`` on the local cluster: refusals, output, and real processes."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.paths import PACKAGE
from llmctl.runs.index import RunIndex
from llmctl.runs.record import RunRecord
from tests.free_ports import free_ports
from tests.llmctl.run_directories import TRANSPORT
from tests.waiting import HANG_S, wait_for

CONFIG = {
    "model": {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 8},
    "training": {"train_iters": 10, "seq_length": 64, "micro_batch_size": 2, "global_batch_size": 8},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}
NASTY = "a b'$(touch pwned) \"`touch pwned`\\\nlast"


@pytest.fixture
def place(home, monkeypatch):
    """A separate home; the working directory has a config file ``c.yaml``."""
    work = home / "work"
    work.mkdir()
    (work / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(work)
    return home


def attempt_of(place: Path, run_id: str, number: int = 1) -> Path:
    return place / "runs" / run_id / "attempts" / str(number)


def ending(place: Path, run_id: str, number: int = 1) -> dict:
    path = attempt_of(place, run_id, number) / "exit.json"
    wait_for(path.exists, (place / "runs" / run_id / "job.log").read_text)
    return json.loads(path.read_text())


def wait_for_file(path: Path) -> None:
    wait_for(path.exists, str(path))


def job_of(place: Path, run_id: str) -> int:
    return RunRecord.load(place / "runs" / run_id, TRANSPORT).submissions[-1].jobs[0].pid


REFUSED = [
    (["--set", "model.num_layer=3"], 2, ["--set model.num_layer", "did you mean model.num_layers?"]),
    (["--set", "nothing=1"], 2, ["--set nothing", "the sections are job, model"]),
    (["--set", "model.num_layers.x=1"], 2, ["--set model.num_layers.x", "single value"]),
    (["--set", "model.num_layers=[1"], 2, ["--set model.num_layers", "not YAML"]),
    (["--set", "x"], 2, ["--set x", "key=value"]),
    (["--nodes", "3"], 2, ["--nodes", "c.yaml: training.global_batch_size", "use 6 or 12"]),
    (["--nodes", "0"], 2, ["--nodes", "greater than 0"]),
    (["--nodes", "two"], 2, ["--nodes", "integer"]),
    (
        ["--set", "parallel.tensor_model_parallel_size=2"],
        2,
        ["TP 2 x PP 1", "world size 1", "nearest layouts that fit"],
    ),
    (["--set", "model.num_attention_heads=6"], 2, ["--set model.num_attention_heads", "use one of 1, 2, 4, 8"]),
    (["--set", "parallel.pipeline_model_parallel_size=11"], 2, ["8 layers", "use at most 10"]),
    (["--set", "model.group_query_attention=true"], 2, ["--set model.group_query_attention", "model.num_query_groups"]),
    (["--set", "data.mock_data=false"], 2, ["data.data_path", "is unset", "data prepare"]),
    (["--set", "data.mock_data=false", "--set", "data.data_path=toks"], 2, ["--set data.data_path", "/work/toks.bin"]),
    (["--gpus-per-node", "2"], 2, ["--gpus-per-node", "no GPU", "--gpus-per-node 1 --nodes 2 for as many ranks"]),
    (["--queue", "q"], 2, ["--queue", "no queues", "leave it out"]),
    (["--mount", "a:b"], 2, ["--mount", "'a:b'", "no containers"]),
    (["--nodes", "100000"], 2, ["--nodes", "above 1024"]),
    (["--set", "checkpoint.save=/proc/x"], 2, ["--set checkpoint.save", "cannot be written"]),
    (["--set", "data.data_cache_path=c.yaml/x"], 2, ["--set data.data_cache_path", "is not a folder"]),
    (["--"], 2, ["--", "no COMMAND"]),
    (["--launcher", "srun"], 2, ["--launcher", "use torchrun"]),
    (["--time", "12"], 2, ["--time", "no unit", "1:30:00"]),
    (["--set", "job.time=12"], 2, ["--set job.time", "no unit"]),
    (["--env", "NAME"], 2, ["--env NAME", "NAME=VALUE"]),
    (["--env", "1A=x"], 2, ["--env", "cannot name a variable"]),
    (["--secret", "NOT_SET_HERE"], 2, ["--secret NOT_SET_HERE", "not set in your environment"]),
    (["--run-id", "a b"], 2, ["--run-id a b", "letters"]),
    (["--name", "a/b"], 2, ["--name", "letters"]),
    (["--cluster", "nowhere"], 2, ["--cluster", "nowhere", "llmctl clusters list"]),
    (["nofile.yaml"], 2, ["CONFIG", "nofile.yaml"]),
]


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_flags_are_refused_in_two_lines_and_change_nothing(place, capsys, arguments, code, message):
    config = [] if arguments[0].endswith(".yaml") else ["c.yaml"]
    assert main(["submit", *config, *arguments]) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.rstrip().splitlines()) <= 2
    assert [words for words in message if words not in output.err] == []
    assert sorted(path.name for path in place.iterdir()) == ["work"]


FILES = [
    ({"model": {**CONFIG["model"], "hiden_size": 1}}, ["c.yaml: model.hiden_size", "did you mean model.hidden_size?"]),
    ({"parallel": {"tensor_model_parallel_size": 2}}, ["c.yaml: parallel.tensor_model_parallel_size", "world size 1"]),
    ({"data": {"data_path": ["toks"]}}, ["c.yaml: data.data_path", "/work/toks.bin", "data prepare"]),
    ({"data": {"data_path": "0.3 toks 0.7 more"}}, ["c.yaml: data.data_path", "/work/toks.bin"]),
    ({"data": {"data_path": [0, "gone", 2, "toks"]}}, ["c.yaml: data.data_path", "/work/toks.bin"]),
    (
        {"data": {"streaming": True, "data_path": ["text.jsonl"], "tokenizer_model": "t.json"}},
        ["c.yaml: data.data_path", "/work/text.jsonl; name a file or folder of text"],
    ),
    ({"job": {"queue": "q"}}, ["c.yaml: job.queue", "no queues"]),
    ({"job": {"env": {"1A": "x"}}}, ["c.yaml: job.env.1A", "cannot name a variable"]),
    ({"checkpoint": {"load": "gone"}}, ["c.yaml: checkpoint.load", "/work/gone"]),
]


@pytest.mark.parametrize(("change", "message"), FILES, ids=lambda value: str(value)[:40])
def test_a_bad_config_is_refused_with_file_and_key(place, capsys, change, message):
    Path("c.yaml").write_text(yaml.safe_dump({**CONFIG, **change}))
    assert main(["submit", "c.yaml"]) == 3
    error = capsys.readouterr().err
    assert len(error.rstrip().splitlines()) <= 2
    assert [words for words in message if words not in error] == []
    assert sorted(path.name for path in place.iterdir()) == ["work"]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("root", ["/proc/nothing", "/etc/passwd/runs", "/tmp/a:b"])
def test_a_folder_that_cannot_hold_runs_is_refused(capsys, monkeypatch, root):
    monkeypatch.setenv("LLMCTL_RUNS_ROOT", root)
    assert main(["submit", "c.yaml"]) == 3
    assert f"LLMCTL_RUNS_ROOT: {root} cannot hold the runs" in capsys.readouterr().err


def test_a_missing_torch_is_refused_with_the_install_command(place, capsys):
    folder = place / "config" / "llmctl" / "clusters"
    folder.mkdir(parents=True)
    bare = place / "python"
    bare.write_text("#!/bin/sh\nexit 3\n")
    bare.chmod(0o755)
    (folder / "local.yaml").write_text(f"environment: {{python: {bare}}}")
    assert main(["submit", "c.yaml"]) == 3
    assert f"install it: {bare} -m pip install '{PACKAGE.parent}[train]'\n" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_without_a_config_the_chosen_one_is_named(capsys):
    assert main(["submit", "--show-script"]) == 0
    assert "bundled example" in capsys.readouterr().err
    Path("c.yaml").rename("llmctl.yaml")
    assert main(["submit", "--show-script"]) == 0
    assert "./llmctl.yaml" in capsys.readouterr().err
    Path("llmctl.yml").write_text(Path("llmctl.yaml").read_text())
    assert main(["submit", "--show-script"]) == 2
    assert "there are ./llmctl.yaml and ./llmctl.yml; name the one to take" in capsys.readouterr().err
    assert main(["submit", "--show-script", "--example"]) == 0
    assert "bundled example" in capsys.readouterr().err
    Path("llmctl.yaml").unlink()
    assert main(["submit", "--show-script"]) == 0
    assert "using ./llmctl.yml" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_null_empties_a_list_of_the_file(capsys):
    Path("c.yaml").write_text(yaml.safe_dump({**CONFIG, "data": {"data_path": ["toks"]}}))
    unset = ["--set", "data.data_path=null"]
    assert main(["submit", "c.yaml", "--dry-run", "--set", "data.mock_data=true"]) == 2
    assert "set only one of the two: null unsets a path" in capsys.readouterr().err
    assert main(["submit", "c.yaml", "--dry-run", *unset, "--set", "data.mock_data=true"]) == 0
    assert "generated" in capsys.readouterr().out
    assert main(["submit", "c.yaml", "--dry-run", *unset]) == 2
    assert "data.data_path: is unset" in capsys.readouterr().err


def test_a_dry_run_prints_the_submitted_script_and_writes_nothing(place, capsys, monkeypatch):
    monkeypatch.setenv("TOKEN", "hidden-value")
    arguments = ["submit", "--run-id", "same", "--env", f"X={NASTY}", "--secret", "TOKEN", "--", "true"]
    assert main([*arguments[:1], "--show-script", *arguments[1:]]) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in place.iterdir()) == ["work"]
    assert main(arguments) == 0
    assert ending(place, "same")["code"] == 0
    script = (place / "runs" / "same" / "job.sh").read_text()
    assert printed == f"{script}# submitted on localhost: bash {place}/runs/same/job.sh\n"
    assert (attempt_of(place, "same") / "job.sh").read_text() == script
    assert subprocess.run(["bash", "-n"], input=printed, text=True, check=False).returncode == 0
    assert "hidden-value" not in printed


@pytest.mark.usefixtures("place")
def test_a_dry_run_shows_batch_sizes_in_steps(capsys):
    steps = ["--set", "training.global_batch_size=null", "--set", "training.step_batch_size_schedule=0:4 640:8"]
    assert main(["submit", "c.yaml", "--dry-run", *steps]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "8 samples of 64 = 512 tokens a step (micro-batch 2" in shown
    assert ", from 4 samples (2 steps, the last from sample 10 on)" in shown
    # Three batches of 4 and seven of 8.
    assert "10 steps = 4.35 k tokens" in shown
    assert "micro-batch x dp" not in shown


def test_a_dry_run_in_json_holds_script_and_commands(place, capsys):
    assert main(["submit", "c.yaml", "--show-script", "--json", "--run-id", "j"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["commands"] == [{"host": "localhost", "argv": ["bash", f"{place}/runs/j/job.sh"]}]
    assert document["script"].startswith("#!/usr/bin/env bash\n# Run j ")


def test_a_command_runs_once_per_node_with_its_environment(place, monkeypatch):
    monkeypatch.setenv("TOKEN", f"secret {NASTY}")
    program = 'printf "%s\\0" "$NODE_RANK/$NNODES" "$MASTER_ADDR" "$X" "$TOKEN" "$PWD" "$1"; wc -l <"$LLMCTL_HOSTFILE"'
    # The file of the secrets is gone before the command begins.
    program = f"{program}; ls {shlex.quote(str(place / 'state/llmctl/secrets'))}"
    shell = ["bash", "-c", program, "bash", NASTY]
    arguments = ["submit", "--nodes", "2", "--run-id", "r", "--env", f"X={NASTY}", "--secret", "TOKEN", "--", *shell]
    assert main(arguments) == 0
    assert ending(place, "r") | {"time": 0, "node": ""} == {
        "code": 0, "reason": "completed", "cause": "", "signal": None, "time": 0, "node": ""
    }  # fmt: skip
    for node in range(2):
        printed = (attempt_of(place, "r") / f"node-{node:05d}.log").read_text().split("\0")
        assert printed[:6] == [f"{node}/2", "127.0.0.1", NASTY, f"secret {NASTY}", f"{place}/work", NASTY]
        assert printed[6].strip() == "2"
    holders = [path for path in place.rglob("*") if path.is_file() and b"secret a b" in path.read_bytes()]
    assert {path.name for path in holders} == {"node-00000.log", "node-00001.log"}
    assert list((place / "state" / "llmctl" / "secrets").iterdir()) == []
    assert not Path("pwned").exists()


def test_the_record_has_the_request_and_its_origins(place, capsys, monkeypatch):
    monkeypatch.setenv("LLMCTL_GROUP", "physics")
    (place / "work" / "lib").mkdir()
    (place / "work" / "lib" / "mine.py").write_text("x = 1\n")
    assert (
        main(
            ["submit", "--run-id", "r", "--name", "n", "--set", "job.code=[lib]", "--json", "--", "cat", "lib/mine.py"]
        )
        == 0
    )
    summary = json.loads(capsys.readouterr().out)
    assert ending(place, "r")["code"] == 0
    assert (attempt_of(place, "r") / "node-00000.log").read_text() == "x = 1\n"
    path = place / "runs" / "r" / "run.json"
    assert path.stat().st_mode & 0o777 == 0o600
    values = json.loads(path.read_text())
    assert values["schema"] == 1
    assert values["config"] is None
    assert values["job"]["command"] == ["cat", "lib/mine.py"]
    assert values["job"]["group"] == "physics"
    assert values["origins"] == {"job.code": "--set", "job.group": "LLMCTL_GROUP", "job.name": "--name"}
    assert summary["job_ids"] == [values["submissions"][0]["jobs"][0]["job_id"]]
    started = json.loads((attempt_of(place, "r") / "started.json").read_text())
    job = values["submissions"][0]["jobs"][0]
    assert {name: started[name] for name in ("job_id", "pid", "pid_start_time", "boot_id")} == {
        name: job[name] for name in ("job_id", "pid", "pid_start_time", "boot_id")
    }
    entry = RunIndex(place / "state" / "llmctl").find("n")
    assert (entry.run_id, entry.job_ids) == ("r", (job["job_id"],))
    code = place / "runs" / "r" / "code"
    assert (code / "trainer").resolve().parent.name == values["code"]["trainer"]
    assert (code / "trainer" / "config" / "train_config.py").is_file()


def test_a_failing_node_ends_the_others_and_gives_its_exit_code(place):
    program = '[ "$NODE_RANK" = 1 ] && exit 7; setsid sleep 4000 & trap "" TERM; sleep 4001'
    assert main(["submit", "--nodes", "3", "--run-id", "f", "--", "bash", "-c", program]) == 0
    end = ending(place, "f")
    assert (end["code"], end["reason"], end["signal"]) == (7, "failed", None)
    assert survivors(place / "runs" / "f") == []


def test_a_stopped_job_ends_and_records_the_signal(place):
    program = 'touch "$LLMCTL_RUN_DIR/ready"; sleep 4000 & wait'
    assert main(["submit", "--run-id", "s", "--", "bash", "-c", program]) == 0
    wait_for_file(place / "runs" / "s" / "ready")
    os.kill(job_of(place, "s"), signal.SIGTERM)
    end = ending(place, "s")
    assert (end["code"], end["reason"], end["signal"]) == (143, "stopped", "TERM")
    assert (attempt_of(place, "s") / "stop").exists()
    assert survivors(place / "runs" / "s") == []


def test_the_time_limit_ends_a_job(place):
    assert main(["submit", "--run-id", "t", "--time", "0:0:1", "--", "sleep", "4000"]) == 0
    assert ending(place, "t")["signal"] == "USR1"
    assert "asked to stop at the time limit, after 1 s" in (place / "runs" / "t" / "job.log").read_text()


def test_killing_llmctl_does_not_end_the_run(place):
    program = 'touch "$LLMCTL_RUN_DIR/ready"; until [ -e "$LLMCTL_RUN_DIR/go" ]; do sleep 0.1; done'
    arguments = ["submit", "--run-id", "d", "--follow", "--", "bash", "-c", program]
    client = subprocess.Popen(
        [sys.executable, "-m", "llmctl.cli.main", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_file(place / "runs" / "d" / "ready")
    finally:
        os.killpg(client.pid, signal.SIGKILL)
        client.wait(HANG_S)
    (place / "runs" / "d" / "go").touch()
    assert ending(place, "d")["reason"] == "completed"


def test_simultaneous_runs_get_different_ids_and_ports(place):
    folder = place / "config" / "llmctl" / "clusters"
    folder.mkdir(parents=True)
    (folder / "local.yaml").write_text(f"rendezvous: {{ports: {list(free_ports(5))}}}")
    program = 'printf "$MASTER_PORT" >"$LLMCTL_RUN_DIR/port"; until [ -e "$GO" ]; do sleep 0.1; done'
    for number in range(3):
        arguments = ["submit", "--run-id", f"p{number}", "--env", f"GO={place}/go", "--", "bash", "-c", program]
        assert main(arguments) == 0
    try:
        for number in range(3):
            wait_for_file(place / "runs" / f"p{number}" / "port")
    finally:
        (place / "go").touch()
    for number in range(3):
        assert ending(place, f"p{number}")["code"] == 0
    ports = {(place / "runs" / f"p{number}" / "port").read_text() for number in range(3)}
    assert len(ports) == 3


def test_a_run_id_is_used_once(place, capsys):
    assert main(["submit", "--run-id", "once", "--", "true"]) == 0
    assert ending(place, "once")["code"] == 0
    assert main(["submit", "--run-id", "once", "--", "true"]) == 2
    assert "--run-id once" in capsys.readouterr().err


def survivors(run_dir: Path) -> list[str]:
    mark = f"LLMCTL_RUN_DIR={run_dir}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("place")
def test_more_ranks_than_cores_are_told_once(monkeypatch, capsys):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    sized = ["c.yaml", "--set", "training.global_batch_size=128"]
    for job, what in ((sized, "ranks"), (["--", "true"], "processes")):
        assert main(["submit", "--dry-run", "--nodes", "64", *job]) == 0
        words = f"--nodes: 64 {what} share the 2 cores of this machine, which is slow; 2 fit"
        assert [line for line in capsys.readouterr().err.splitlines() if "cores" in line] == [words]
    assert main(["submit", "--dry-run", "--nodes", "2", "c.yaml"]) == 0
    assert "cores" not in capsys.readouterr().err
