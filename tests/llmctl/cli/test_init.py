"""``llmctl init``: configs that are complete, and can be submitted as they are."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from llmctl.cli.main import main
from tests.llmctl.submit.test_submit import place
from trainer.families.catalogue import FAMILIES
from trainer.families.format.family import Family
from trainer.planning.build_config import build_config

__all__ = ["place"]


def published(folder: Path, family: Family) -> Path:
    folder.mkdir()
    keys = {"model_type": family.model_type, "architectures": [family.architecture], **family.tiny}
    (folder / "config.json").write_text(json.dumps(keys))
    (folder / "pytorch_model.bin").touch()
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    save_file({"weight": np.zeros(4, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "DeepSeek-V3"])
def test_the_config_of_a_folder_is_complete(place, capsys, name) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    folder = published(place / "work" / "it's a model", family)
    assert main(["init", "--from", "it's a model", "-o", "new.yaml"]) == 0
    assert "wrote new.yaml" in capsys.readouterr().err
    values = yaml.safe_load((place / "work/new.yaml").read_text())
    config = build_config(values)
    assert (config.checkpoint.load, config.data.tokenizer_model) == (str(folder), str(folder))
    assert config.training.seq_length == config.model.max_position_embeddings == 64
    assert config.model.num_layers == values["model"]["num_layers"]
    # Nothing in it makes another model of the folder's weights.
    mock = ["--set", "data.data_path=[]", "--set", "data.mock_data=true", "--set", "training.global_batch_size=2"]
    assert main(["submit", "--dry-run", "new.yaml", *mock]) == 0
    # The words of its comment make the run short, and go with every model.
    comment = (place / "work/new.yaml").read_text().partition("A first try")[2].partition("\ncheckpoint:")[0]
    short = re.findall(r"--set \S+=\S+", comment)
    capsys.readouterr()
    assert main(["submit", "--dry-run", "new.yaml", *mock[:4], *" ".join(short).split()]) == 0
    plan = capsys.readouterr().out
    assert "20 steps = " in plan and "4 samples of 64 = 256 tokens a step" in plan and "fp32" in plan


def test_a_script_becomes_the_config_of_import_script(place, capsys) -> None:
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64"
    rest = "--train-iters 10 --lr 1e-4 --micro-batch-size 1 --mock-data --vocab-size 512 --tokenizer-type NullTokenizer"
    (place / "work/t.sh").write_text(f"torchrun --nproc-per-node 1 pretrain_gpt.py {shape} {rest}\n")
    assert main(["init", "--from", "t.sh"]) == 0
    assert main(["import-script", "t.sh"]) == 0
    written = yaml.safe_load((place / "work/llmctl.yaml").read_text())
    assert written == yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["--from", "nowhere"], "--from: there is no nowhere"),
        (["--from", "empty"], "--from: there is no model in "),
        (["--from", "c.yaml"], "--from: c.yaml is not a shell script"),
        (["--from", "model", "--output", "c.yaml"], "--output c.yaml: exists already"),
        (["--from", "fancy"], "model_type 'fancy' is not a family known here"),
    ],
)
def test_what_cannot_be_written_is_told(place, capsys, line, says) -> None:
    (place / "work/empty").mkdir()
    (place / "work/fancy").mkdir()
    (place / "work/fancy/config.json").write_text('{"model_type": "fancy"}')
    published(place / "work/model", FAMILIES[0])
    assert main(["init", *line]) == 2
    assert says in capsys.readouterr().err
    assert not (place / "work/llmctl.yaml").exists()
