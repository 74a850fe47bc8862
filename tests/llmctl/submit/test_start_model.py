"""A submission whose model comes from the folder that it starts from."""

import json
from pathlib import Path

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.runs.record import RunRecord
from tests.llmctl.run_directories import TRANSPORT
from tests.llmctl.submit.test_submit import ending, place
from trainer.families.llama import LLAMA

__all__ = ["place"]

REST = {
    "training": {"train_iters": 2, "seq_length": 8, "micro_batch_size": 1, "device": "cpu"},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}


@pytest.fixture
def work(place) -> Path:
    """A working directory with a published model of other weights, and a config without a model section."""
    work = place / "work"
    (work / "hf").mkdir()
    keys = {**LLAMA.tiny, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (work / "hf" / "config.json").write_text(json.dumps(keys))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (work / "hf" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    (work / "c.yaml").write_text(yaml.safe_dump(REST))
    return work


def submit(*arguments: str) -> int:
    return main(["submit", "--cluster", "local", "--set", "checkpoint.load=hf", *arguments, "c.yaml"])


def test_the_run_records_the_model_and_its_origin(work, place, capsys) -> None:
    assert submit("--run-id", "r", "--set", "model.hidden_dropout=0.2") == 0
    assert f"the model is that of {work}/hf/config.json" in capsys.readouterr().err
    record = RunRecord.load(place / "runs" / "r", TRANSPORT)
    model = record.config["model"]
    assert (model["hidden_size"], model["attention_dropout"], model["hidden_dropout"]) == (32, 0.0, 0.2)
    assert (model["vocab_size"], model["max_position_embeddings"]) == (101, 64)
    assert record.origins["model.hidden_size"] == f"{work}/hf/config.json"
    assert record.origins["model.hidden_dropout"] == "--set"
    ending(place, "r")  # by itself: the folder has no weights of the model


def test_a_shape_can_be_taken_without_weights(work, place) -> None:
    (work / "c.yaml").write_text(yaml.safe_dump({**REST, "model": {"from": "hf", "num_layers": 2}}))
    assert main(["submit", "--cluster", "local", "--run-id", "shape", "c.yaml"]) == 0
    model = RunRecord.load(place / "runs" / "shape", TRANSPORT).config["model"]
    assert ending(place, "shape")["code"] == 0
    assert (model["num_layers"], model["hidden_size"]) == (2, 32)
    assert "from" not in model


def test_all_differences_are_told_at_once_with_their_origin(work, capsys) -> None:
    (work / "c.yaml").write_text(yaml.safe_dump({**REST, "model": {"num_layers": 4, "norm_epsilon": 0.1}}))
    assert submit("--show-script", "--set", "model.hidden_size=64") == 3
    told = capsys.readouterr().err
    where = f"{work}/hf/config.json"
    assert f"{work}/c.yaml: model.norm_epsilon: is 0.1, but {where} has 1e-06; remove the key" in told
    assert f"--set model.hidden_size: is 64, but {where} has 32; remove the key" in told


def test_a_folder_without_a_model_is_refused(work, capsys) -> None:
    (work / "hf" / "config.json").unlink()
    assert submit("--show-script") == 2
    told = capsys.readouterr().err
    assert f"--set checkpoint.load: there is no model in {work}/hf to take the section model from" in told


@pytest.mark.usefixtures("work")
def test_a_dry_run_does_not_ask_another_machine(place, capsys) -> None:
    profile = place / "config" / "llmctl" / "clusters" / "far.yaml"
    profile.parent.mkdir(parents=True, exist_ok=True)
    profile.write_text(
        "{scheduler: slurm, login: {host: nowhere.invalid}, runs_root: /runs, environment: {kind: venv, path: /venv}}"
    )
    far = ["submit", "--cluster", "far", "--show-script", "--set", "checkpoint.load=/models/hf"]
    assert main([*far, "c.yaml"]) == 2
    told = capsys.readouterr().err
    assert "--set checkpoint.load: the model is read on nowhere.invalid, which a dry run does not contact" in told
    shape = ["--set", "model.num_layers=2", "--set", "model.hidden_size=8", "--set", "model.num_attention_heads=2"]
    assert main([*far, *shape, "c.yaml"]) == 0
