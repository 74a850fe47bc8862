"""Files that a script reads with source: their assignments count, as in bash, if they lie beside the script."""

import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from llmctl.errors import UsageError
from llmctl.scripts.import_script import flags_of, import_script
from tests.waiting import HANG_S

NOW = datetime(2026, 1, 2, 3, 4, 5)
PARAMS = """
LR=${LR:-9e-9}
ALL_PARAMS=(--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1)
ALL_PARAMS+=(--global-batch-size 2 --train-iters 10 --swiglu --normalization RMSNorm --lr $LR ${1:-})
return 0
ALL_PARAMS=()
"""
TRAIN = 'torchrun --nproc_per_node 1 pretrain_gpt.py "${ALL_PARAMS[@]}" --lr-warmup-iters ${WARMUP:-0}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run/params").mkdir(parents=True)
    (tmp_path / "run/params/small.sh").write_text(PARAMS)
    (tmp_path / "outside.sh").write_text("WARMUP=7\n")
    return tmp_path / "run"


def words(folder: Path, script: str, **given: str) -> list[str]:
    path = folder / "train.sh"
    path.write_text(script)
    return [word for group in flags_of(path, given, NOW) for word in group.words]


def words_of_bash(folder: Path) -> list[str]:
    """The training line's words, with torchrun replaced by printf."""
    shown = subprocess.run(
        ["bash", "-c", 'torchrun() { shift 3; printf "%s\\n" "$@"; }; source ./train.sh'],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    return shown.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    "name", ["params/small.sh", "./params/small.sh --bf16", "$(dirname ./train.sh)/params/small.sh"]
)
def test_a_file_beside_the_script_is_read_as_in_bash(folder: Path, name: str) -> None:
    found = words(folder, f"source {name}\n{TRAIN}")
    assert "--swiglu" in found and "9e-9" in found
    assert found == words_of_bash(folder)


@pytest.mark.parametrize("name", ["${NOWHERE}/params/small.sh", "/groups/experiment/run/params/small.sh"])
def test_the_folder_of_the_script_is_known_where_the_script_names_another_machines(folder: Path, name: str) -> None:
    assert "--swiglu" in words(folder, f". {name}\n{TRAIN}")


def test_a_variable_in_the_name_is_asked_for_with_the_files_that_fit(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--arg PARAM=VALUE; by the files beside the script one of small$"):
        words(folder, f"source params/${{PARAM}}.sh\n{TRAIN}")
    assert "--swiglu" in words(folder, f"source params/${{PARAM}}.sh\n{TRAIN}", PARAM="small")


def test_a_variable_may_be_a_part_of_a_name(folder: Path) -> None:
    (folder / "params/small-v1.sh").write_text(PARAMS)
    with pytest.raises(UsageError, match=r"--arg V=VALUE; by the files beside the script one of 1$"):
        words(folder, f"source params/small-v$V.sh\n{TRAIN}")
    with pytest.raises(UsageError, match=r"--arg V=VALUE; by the files beside the script one of 1$"):
        words(folder, f"source $W/params/small-v$V.sh\n{TRAIN}")


def test_a_variable_may_name_a_file_in_a_folder_below(folder: Path) -> None:
    (folder / "conf/small").mkdir(parents=True)
    (folder / "conf/all.sh").write_text("source conf/$1.sh\n")
    (folder / "conf/small/7b.sh").write_text(PARAMS)
    with pytest.raises(UsageError, match=r"--arg 1=VALUE; by the files beside the script one of small/7b \("):
        words(folder, f"source conf/all.sh\n{TRAIN}")
    assert "--swiglu" in words(folder, f"source conf/all.sh\n{TRAIN}", **{"1": "small/7b"})


def test_a_file_elsewhere_is_left_to_the_profile(folder: Path) -> None:
    (folder / "train.sh").write_text(f"source ../outside.sh\nsource ./venv/bin/activate\n. params/small.sh\n{TRAIN}")
    text = import_script(folder / "train.sh", "train.sh", {}, NOW).text
    assert "source ../outside.sh" in text and "source ./venv/bin/activate" in text
    assert "lr_warmup_iters: 0" in text.replace(".0", "")


def test_a_bad_file_is_named(folder: Path) -> None:
    (folder / "params/small.sh").write_text("if true; then\n")
    with pytest.raises(UsageError, match=r"line 1: if opens here .* \(in params/small\.sh, read here\)"):
        words(folder, f"source params/small.sh\n{TRAIN}")
