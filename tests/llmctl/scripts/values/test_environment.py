"""Variables that a script leaves to the environment, as bash reads them."""

import os
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.errors import UsageError
from llmctl.scripts.import_script import ImportedScript, import_script
from trainer.config.paths.variables import replace_variables

SCRIPT = """#!/bin/bash
CKPT=$SCRATCH/ck
cd $WORK/code
torchrun --nproc_per_node 1 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \\
 --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-3 --train-iters ${ITERS} --vocab-size 128 \\
 --save "$CKPT" --load "$CKPT" --data-path $DATA_PATH --vocab-file $VOCAB --merge-file merges.txt $EXTRA
"""
ENVIRONMENT = {
    "SCRATCH": "/scratch/a b",
    "WORK": "/work",
    "ITERS": "10",
    "DATA_PATH": "0.3 /a 0.7 rel/b",
    "VOCAB": "v.json",
    "EXTRA": "--swiglu --seed 7",
}


def read(folder: Path, script: str = SCRIPT, **environment: str) -> ImportedScript:
    path = folder / "train.sh"
    path.write_text(script)
    return import_script(path, "train.sh", {}, datetime(2026, 1, 1), environment)


def test_an_absolute_path_stays_a_variable_and_other_values_are_taken(tmp_path: Path) -> None:
    found = read(tmp_path, **ENVIRONMENT)
    assert found.sections["checkpoint"] == {"save": "${SCRATCH}/ck", "load": "${SCRATCH}/ck"}
    assert found.sections["data"] == {
        "data_path": ["0.3", "/a", "0.7", "${WORK}/code/rel/b"],
        "vocab_file": "${WORK}/code/v.json",
        "merge_file": "${WORK}/code/merges.txt",
    }
    assert (found.sections["training"]["train_iters"], found.sections["training"]["seed"]) == (10, 7)
    assert found.sections["model"]["swiglu"] is True
    assert yaml.safe_load(found.text)["checkpoint"] == found.sections["checkpoint"]
    kept = "has the value of the environment; paths of the config keep the variable"
    assert f"#   $SCRATCH (line 2): {kept}" in found.text
    assert "line 5: $ITERS: has the value of the environment" in found.remarks
    assert f"line 2: $SCRATCH: {kept}" in found.remarks


def test_the_paths_are_those_that_bash_makes(tmp_path: Path) -> None:
    """Each flag of real bash, whose launcher prints its words, has the config's value."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "w/code").mkdir(parents=True)
    program = tmp_path / "bin/torchrun"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environment = {**ENVIRONMENT, "WORK": f"{tmp_path}/w", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    found = read(tmp_path, **environment)
    words = subprocess.run(
        ["bash", str(tmp_path / "train.sh")], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    values = replace_variables(found.sections, environment)
    assert values["checkpoint"]["save"] == words[words.index("--save") + 1]
    place = words.index("--data-path") + 1
    below = f"{tmp_path}/w/code"
    assert values["data"]["data_path"] == [*words[place : place + 3], f"{below}/{words[place + 3]}"]
    for flag, key in (("--vocab-file", "vocab_file"), ("--merge-file", "merge_file")):
        assert values["data"][key] == f"{below}/{words[words.index(flag) + 1]}"
    assert str(values["training"]["train_iters"]) == words[words.index("--train-iters") + 1]
    assert str(values["training"]["seed"]) == words[words.index("--seed") + 1]


def test_conditions_and_defaults_see_the_environment_as_in_bash(tmp_path: Path) -> None:
    head = """if [ -z "$DATA_PATH" ]; then echo "DATA_PATH is needed"; exit 1; fi
ITERS=${ITERS:-99}; SEED=${SEED:-5}; [ "$MODE" = long ] && ITERS=${ITERS}0
: ${WORK:?no folder}
"""
    script = head + SCRIPT.replace("$EXTRA", "--seed $SEED")
    found = read(tmp_path, script, **ENVIRONMENT, MODE="long")
    assert (found.sections["training"]["train_iters"], found.sections["training"]["seed"]) == (100, 5)
    assert {remark.split(": ")[1] for remark in found.remarks if "of the environment" in remark} == {
        *(f"${name}" for name in ENVIRONMENT if name != "EXTRA"),
        "$MODE",
    }
    without = {name: value for name, value in ENVIRONMENT.items() if name != "DATA_PATH"}
    with pytest.raises(UsageError, match=r"the script ends here before it trains; .* \(DATA_PATH is needed\)"):
        read(tmp_path, script, **without)


def test_a_part_of_a_path_and_a_changed_one_are_texts(tmp_path: Path) -> None:
    script = SCRIPT.replace('"$CKPT" --load "$CKPT"', "${SCRATCH%/*}/$VOCAB --load ${SCRATCH//a/c}/x")
    found = read(tmp_path, script, **{**ENVIRONMENT, "SCRATCH": "/s/a"})
    assert found.sections["checkpoint"] == {"save": "/s/v.json", "load": "/s/c/x"}


def test_what_the_script_sets_and_what_the_user_gives_win(tmp_path: Path) -> None:
    found = read(tmp_path, f"ITERS=20\n{SCRIPT}", **ENVIRONMENT)
    assert found.sections["training"]["train_iters"] == 20
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    found = import_script(path, "train.sh", {"ITERS": "30"}, datetime(2026, 1, 1), ENVIRONMENT)
    assert found.sections["training"]["train_iters"] == 30


@pytest.mark.parametrize("value", ["", None])
def test_an_unset_or_empty_variable_is_asked_for(value: str | None, tmp_path: Path) -> None:
    environment = {name: one for name, one in ENVIRONMENT.items() if name != "ITERS"}
    with pytest.raises(UsageError, match=r"--train-iters: \$ITERS is not set; give the value with --arg ITERS=VALUE"):
        read(tmp_path, **environment, **({} if value is None else {"ITERS": value}))


def test_a_secret_and_a_hostile_value(tmp_path: Path) -> None:
    found = read(tmp_path, SCRIPT.replace("$EXTRA", "--wandb-project $HF_TOKEN"), **ENVIRONMENT, HF_TOKEN="s3cret")
    assert "s3cret" not in found.text
    with pytest.raises(UsageError, match=r"\$HF_TOKEN is not set"):
        read(tmp_path, SCRIPT.replace("$ITERS", "1").replace("$VOCAB", "$HF_TOKEN/v"), **ENVIRONMENT, HF_TOKEN="s3cret")
    found = read(tmp_path, **{**ENVIRONMENT, "EXTRA": "--swiglu\n--wandb-project\nx:\n"})
    assert yaml.safe_load(found.text)["logging"] == {"wandb_project": "x:"}
    assert "x" not in yaml.safe_load(found.text)
    hostile = read(tmp_path, **{**ENVIRONMENT, "VOCAB": f"/$(id>{tmp_path}/x)"})
    assert hostile.sections["data"]["vocab_file"] == "${VOCAB}"
    assert not (tmp_path / "x").exists()


def test_submit_takes_the_environment_of_the_command(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    script = SCRIPT.replace("--data-path $DATA_PATH --vocab-file $VOCAB --merge-file merges.txt", "--mock-data")
    (tmp_path / "train.sh").write_text(script)
    environment = {**ENVIRONMENT, "HOME": str(tmp_path), "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    assert main(["submit", "train.sh", "--dry-run"], environment) == 0
    assert "train.sh, line 5: $ITERS: has the value of the environment" in capsys.readouterr().err
    assert main(["import-script", "train.sh", "-o", "c.yaml"], environment) == 0
    assert main(["submit", "c.yaml", "--dry-run"], {**environment, "SCRATCH": ""}) == 3
    assert "checkpoint.load: $SCRATCH is not set on this machine" in capsys.readouterr().err
    assert main(["init", "--from", "train.sh", "-o", "d.yaml"], environment) == 0
    assert (tmp_path / "d.yaml").read_text() == (tmp_path / "c.yaml").read_text()
