"""``llmctl.submit`` and ``Run``: real runs on cluster local, and the plans and errors of the command."""

import inspect
import json
import logging
import os
import sys
import threading
from pathlib import Path

import pytest

import llmctl
from llmctl.cli.main import main
from llmctl.runs.record import RunRecord
from llmctl.transport.local import LocalTransport
from llmctl.transport.processes import processes_of_run
from tests.waiting import wait_for

TINY = {
    "model.num_layers": 1,
    "training.train_iters": 6,
    "training.eval_interval": 3,
    "training.eval_iters": 1,
    "training.kernel_backend": "reference",
    "checkpoint.save_interval": 2,
}
CONFIG = {
    "model": {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2},
    "training": {"train_iters": 3, "seq_length": 32, "micro_batch_size": 1},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}


@pytest.fixture
def silent(home, capfd):
    """The home of a user; at the end, the test has printed nothing."""
    yield home
    assert capfd.readouterr() == ("", "")


def test_a_training_runs_to_its_end(silent):
    run = llmctl.submit(example=True, name="first", set=TINY)
    assert run.wait(timeout=None).state is llmctl.JobState.COMPLETED
    view = llmctl.run("first").status()
    assert (view.iteration, view.train_iters, view.run_id) == (6, 6, run.run_id)
    assert run == llmctl.Run(run.run_id[:-1]) and run.run_dir == silent / "runs" / run.run_id


@pytest.mark.usefixtures("silent")
def test_a_command_is_waited_for_and_cancelled():
    run = llmctl.submit(command=["sleep", "10000"], name="long")
    with pytest.raises(llmctl.WaitTimeout, match=f"{run.run_id} has not ended after 0 s: ") as caught:
        run.wait(timeout=0)
    assert isinstance(caught.value, TimeoutError)
    cancelled = run.cancel(grace=5)
    assert cancelled.view is not None and cancelled.view.state is llmctl.JobState.CANCELLED
    assert not cancelled.had_ended and run.cancel().had_ended
    assert processes_of_run(str(run.run_dir)) == []
    with pytest.raises(llmctl.FollowedRunFailed, match="cancelled"):
        run.wait()
    assert run.wait(check=False).state is llmctl.JobState.CANCELLED


@pytest.mark.usefixtures("silent")
def test_a_failed_command_is_resumed():
    run = llmctl.submit(command=["bash", "-c", "test $LLMCTL_ATTEMPT = 2"])
    with pytest.raises(llmctl.FollowedRunFailed, match="failed"):
        run.wait()
    again = run.resume()
    assert again.messages[0] == f"{run.run_id}: runs its command again" and again == run
    assert again.wait().attempts == 2


def test_a_config_from_python_is_the_config_of_the_run(silent):
    config = {**CONFIG, "checkpoint": {"save": Path("kept")}}
    planned = llmctl.dry_run(config, set={"training.train_iters": 5}, name="mine", time="1h", env={"A": "b"})
    assert planned.name == "mine" and "b" in planned.script and not (silent / "runs").exists()
    run = llmctl.submit(config, set={"training.train_iters": 5, "training.kernel_backend": "reference"})
    assert run.name == "run"
    recorded = RunRecord.load(run.run_dir, LocalTransport({}))
    assert recorded.config is not None and recorded.config["training"]["train_iters"] == 5
    assert recorded.config["checkpoint"]["save"] == str(silent / "kept")
    assert (recorded.origins["model.num_layers"], recorded.origins["training.train_iters"]) == (
        "the config mapping",
        "--set",
    )
    run.cancel(grace=0)


def test_the_plan_is_that_of_the_command(home, capsys):
    planned = llmctl.dry_run(example=True, nodes=2, run_id="same", env={"A": "b c"})
    messages = planned.messages
    assert capsys.readouterr() == ("", "")
    assert (
        main(["submit", "--example", "--nodes", "2", "--run-id", "same", "--env", "A=b c", "--dry-run", "--json"]) == 0
    )
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(json.dumps(planned.document))
    assert tuple(err.splitlines()) == messages and messages
    assert planned.script == json.loads(out)["script"] and home.is_dir()


@pytest.mark.usefixtures("silent")
def test_messages_also_go_to_a_logger(caplog):
    with caplog.at_level(logging.INFO, "llmctl"):
        planned = llmctl.dry_run(example=True)
    assert tuple(record.getMessage() for record in caplog.records) == planned.messages != ()


BAD = [
    (["none.yaml"], {"config": "none.yaml"}),
    (["train.py"], {"config": Path("train.py")}),
    (["--example", "--cluster", "nowhere"], {"example": True, "cluster": "nowhere"}),
    (["--example", "--nodes", "0"], {"example": True, "nodes": 0}),
    (["--example", "--time", "soon"], {"example": True, "time": "soon"}),
    (["--example", "--set", "training.train_iter=5"], {"example": True, "set": {"training.train_iter": 5}}),
    (["--example", "--set", "training.train_iters=many"], {"example": True, "set": {"training.train_iters": "many"}}),
    (["--example", "--after", "nobody"], {"example": True, "after": "nobody"}),
    (["--example", "--run-id", "a b"], {"example": True, "run_id": "a b"}),
    (["--example", "--template", "none"], {"example": True, "template": "none"}),
    (["--example", "--", "true"], {"example": True, "command": ["true"]}),
    (["--torchrun", "--", "true"], {"torchrun": True, "command": ["true"]}),
    (["bad.yaml"], {"config": "bad.yaml"}),
    (["secret.yaml"], {"config": "secret.yaml"}),
    (["--hf", "none", "--data", "none.txt"], {"hf": "none", "data": ["none.txt"]}),
]


@pytest.mark.parametrize(("words", "arguments"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_errors_are_those_of_the_command(home, capsys, monkeypatch, words, arguments):
    (home / "bad.yaml").write_text("model: {num_layers: 1")
    real = Path.read_text

    def refused(path, *args, **kwargs):
        if path.name == "secret.yaml":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    (home / "secret.yaml").write_text("")
    monkeypatch.setattr(Path, "read_text", refused)
    code = main(["submit", *words])
    said = capsys.readouterr().err
    with pytest.raises(llmctl.LlmctlError) as caught:
        llmctl.submit(**arguments)
    assert (code, said) == (caught.value.exit_code, f"llmctl: {caught.value}\n") and code > 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "words"), [("status", []), ("cancel", []), ("resume", [])])
def test_an_unknown_run_is_the_commands_error(home, capsys, name, words):
    assert main([name, "nobody", *words]) == 5 and home.is_dir()
    with pytest.raises(llmctl.RecordError) as caught:
        llmctl.Run("nobody")
    assert capsys.readouterr().err == f"llmctl: {caught.value}\n" and caught.value.exit_code == 5


def test_errors_of_a_run_are_those_of_the_command(home, capsys):
    run = llmctl.submit(command=["sleep", "10000"], name="busy")
    wait_for((run.run_dir / "attempts/1/started.json").exists, "the start of the run")
    assert main(["resume", "busy"]) == 5
    with pytest.raises(llmctl.RecordError) as caught:
        run.resume()
    assert capsys.readouterr().err == f"llmctl: {caught.value}\n"
    run.cancel(grace=1)
    assert home.is_dir()


def test_unknown_and_misplaced_arguments_are_pythons_errors():
    for function in (llmctl.submit, llmctl.dry_run):
        with pytest.raises(TypeError, match="unexpected keyword argument 'node'"):
            function("train.yaml", node=3)
    ours, theirs = inspect.signature(llmctl.dry_run), inspect.signature(llmctl.submit)
    assert ours.parameters == theirs.parameters and ours.return_annotation is llmctl.DryRun


def test_threads_and_a_later_environment(silent, monkeypatch):
    found: list[llmctl.Run] = []
    threads = [
        threading.Thread(target=lambda: found.append(_finished(llmctl.submit(command=["true"])))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.run_id for run in found}) == 3
    monkeypatch.setenv("XDG_STATE_HOME", str(silent / "another"))
    with pytest.raises(llmctl.RecordError, match="there is no run yet"):
        llmctl.run(found[0].run_id)


def _finished(run: llmctl.Run) -> llmctl.Run:
    run.wait()
    return run


def test_another_package_trainer_is_refused(silent, monkeypatch):
    monkeypatch.setitem(sys.modules, "trainer", os)
    with pytest.raises(llmctl.UsageError, match="a package trainer that is not llmctl's is imported already"):
        llmctl.submit(command=["true"])
    assert silent.is_dir()
