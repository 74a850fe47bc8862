"""Training runs with a preflight: real ranks, real files, and one measurement replaced."""

from __future__ import annotations

import json

import pytest

from tests.trainer.training.pretraining_job import Job
from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.preflight import start
from trainer.process.failure import NodeError
from trainer.process.launch_environment import LaunchEnvironment
from trainer.process.run_directory import RunDirectory

MODEL = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "vocab_size": 100}


def write_config(run, **checkpoint):
    values = {
        "job": {"preflight": "quick"},
        "model": MODEL,
        "training": {"train_iters": 2, "seq_length": 16, "global_batch_size": 4, "kernel_backend": "reference"},
        "optimizer": {"lr": 1e-3},
        "data": {"mock_data": True},
        "checkpoint": checkpoint,
    }
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(values))
    return run


def read(run, name):
    return json.loads((run / "attempts/1" / name).read_text())


def be_slow():
    from tests.trainer.preflight import replaced
    from trainer.preflight import check

    whole = check.Instruments
    check.Instruments = lambda: replaced.slow(whole())


def test_sound_ranks_train_after_a_real_preflight_beside_other_work(tmp_path):
    """Four ranks share the cores of this machine with each other and with the tests beside them."""
    run = write_config(tmp_path / "run")
    with Job(run, 4) as job:
        assert job.ends(range(4)) == [0, 0, 0, 0]
    found = read(run, "preflight.json")
    assert found["passed"] and found["seconds"] < 60 and not any(one["is_fatal"] for one in found["findings"])
    assert [one["rank"] for one in found["ranks"]] == [0, 1, 2, 3]
    assert all(one["speed"] > 0 and one["clock"] > 0 and one["device"] for one in found["ranks"])
    assert {one["name"]: one["problem"] for one in found["ranks"][0]["folders"]} == {
        "run directory": "",
        "checkpoint folder": "",
    }
    assert "preflight: passed in " in (run / "attempts/1/rank-00000.log").read_text()
    assert read(run, "outcome.json")["reason"] == "completed"
    assert not list(run.rglob(".preflight-*"))


def test_a_bad_rank_ends_the_attempt_before_a_model_is_built(tmp_path):
    run = write_config(tmp_path / "run")
    with Job(run, 2, {1: be_slow}) as job:
        assert job.ends(range(2)) == [1, 1]
    # Ranks of one machine have one host.
    host = read(run, "heartbeat/rank-00001.json")["host"]
    error = read(run, "errors/rank-00001.json")
    assert (error["type"], error["culprits"], error["consequence"]) == ("NodeError", [host], False)
    assert error["message"].startswith(f"preflight: node {host} (rank 1): speed of a matrix product: ")
    assert "; leave the node out with --exclude, and tell the administrators" in error["message"]
    assert not (run / "attempts/1/errors/rank-00000.json").exists()
    found = read(run, "preflight.json")
    assert not found["passed"] and found["findings"][0]["sentence"] in error["message"]
    assert not (run / "metrics.jsonl").exists() and not (run / "checkpoints").exists()


def have_little_room():
    from trainer.preflight import measuring

    measuring.shutil.disk_usage = lambda _: type("Usage", (), {"free": 7})


def test_a_remark_is_shown_and_the_run_completes(tmp_path):
    run = write_config(tmp_path / "run")
    with Job(run, 2, {0: have_little_room}) as job:
        assert job.ends(range(2)) == [0, 0]
    heartbeat = read(run, "heartbeat/rank-00000.json")
    sentence = f"node {heartbeat['host']} (rank 0): room in the checkpoint folder "
    assert heartbeat["warning"].startswith(sentence)
    assert f"preflight: note: {sentence}" in (run / "attempts/1/rank-00000.log").read_text()


def test_a_checkpoint_folder_that_cannot_be_written_blames_no_node(tmp_path):
    (tmp_path / "file").write_text("")
    run = write_config(tmp_path / "run", save=str(tmp_path / "file" / "saves"))
    with Job(run, 2) as job:
        assert job.ends(range(2)) == [1, 1]
    error = read(run, "errors/rank-00000.json")
    assert error["culprits"] == [] and f"checkpoint folder {tmp_path}/file/saves: [Errno 20]" in error["message"]


def test_a_missing_folder_of_saved_checkpoints_is_left_to_the_wait_for_its_mount(tmp_path):
    run = RunDirectory(tmp_path)
    save = tmp_path / "mount" / "saves"
    assert start._folders(run, save) == [("run directory", run.attempt_dir), ("checkpoint folder", save)]
    run.saved.write_text("{}")
    assert start._folders(run, save) == [("run directory", run.attempt_dir)]
    save.mkdir(parents=True)
    assert ("checkpoint folder", save) in start._folders(run, save)
    assert start._folders(None, None) == []


@pytest.mark.parametrize(("preflight", "expected"), [("quick", NodeError), ("off", ConfigError)])
def test_a_node_that_lacks_gpus_is_named_before_the_rendezvous(monkeypatch, preflight, expected):
    monkeypatch.setattr(start.torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(start.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(start.torch.version, "cuda", "13.0")
    config = TrainConfig.model_validate(
        {
            "job": {"preflight": preflight},
            "model": MODEL,
            "training": {"train_iters": 1, "seq_length": 8},
            "optimizer": {"lr": 1e-3},
        }
    )
    with pytest.raises(expected, match="GPUs") as caught:
        start.choose_sound_device(config, LaunchEnvironment(3, 3, 4, 4))
    assert preflight == "off" or "number of GPUs: 3, expected 4, as asked (job.gpus_per_node)" in str(caught.value)
