"""A script that starts another: the other is read if it lies beside, with its arguments and exported variables."""

from datetime import datetime
from pathlib import Path

import pytest

from llmctl.errors import UsageError
from llmctl.scripts.import_script import ImportedScript, import_script

NOW = datetime(2026, 1, 2, 3, 4, 5)
FLAGS = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 16 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
)
NODE = f"""HIDDEN=7
export NCCL_DEBUG=INFO
torchrun --nnodes $NNODES --nproc_per_node 4 {FLAGS} --lr $1 --seed ${{SEED:-5}} --min-lr ${{OWN:-0}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "run_node.sh").write_text(NODE)
    (tmp_path / "deep/run_node.sh").write_text(NODE)
    (tmp_path / "wrapper.sh").write_text('export RANK=$SLURM_PROCID\nexec "$@"\n')
    (tmp_path / "setup.sh").write_text("pip install x\nif broken\n")
    (tmp_path / "outer.sh").write_text('bash ./run_node.sh "$@"\n')
    (tmp_path / "self.sh").write_text("bash self.sh\nbash self.sh\n")
    return tmp_path


def read(folder: Path, text: str) -> ImportedScript:
    (folder / "train.sh").write_text(text)
    return import_script(folder / "train.sh", "train.sh", {}, NOW)


@pytest.mark.parametrize(
    "line",
    [
        "bash run_node.sh 0.5",
        "bash -ex -o pipefail ./run_node.sh 0.5",
        "./run_node.sh 0.5",
        "srun -N 2 ./run_node.sh 0.5",
        "srun --nodes=2 bash run_node.sh 0.5",
        "bash $(dirname $0)/run_node.sh 0.5",
        "cd deep; bash run_node.sh 0.5",
        "srun -N 2 bash -c 'echo start; bash run_node.sh 0.5'",
        "bash outer.sh 0.5",
        "bash setup.sh; bash run_node.sh 0.5",
        "mpirun -np 8 -npernode 4 ./wrapper.sh bash run_node.sh 0.5",
    ],
)
def test_a_script_beside_is_read_with_its_arguments(line: str, folder: Path) -> None:
    found = read(folder, f"export NNODES=2\nexport SEED=9\nOWN=3\n{line}\n").sections
    assert (found["optimizer"]["lr"], found["training"]["seed"], found["optimizer"]["min_lr"]) == (0.5, 9, 0)
    assert (found["job"]["nodes"], found["job"]["gpus_per_node"]) == (2, 4)
    assert found["job"]["env"] == {"NCCL_DEBUG": "INFO"}


def test_a_wrapper_passes_the_training_line_on(folder: Path) -> None:
    found = read(folder, f"srun --ntasks-per-node=4 -N 2 ./wrapper.sh python {FLAGS} --lr 1\n").sections
    assert (found["job"]["nodes"], found["job"]["gpus_per_node"]) == (2, 4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("srun ./other.sh", "line 2: starts ./other.sh, which is not beside the script; put it there, or import"),
        ("bash $HOME/other.sh", "line 2: starts ~/other.sh, which is not beside the script"),
        ("bash setup.sh", r"\(in setup.sh, read here\)"),
        ("bash self.sh", "line 2: starts self.sh again and again"),
        ("bash run_node.sh", r"line 2: --lr: the script's argument \$1 is not set"),
    ],
)
def test_a_script_that_cannot_be_read_is_named(line: str, message: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read(folder, f"export NNODES=1\n{line}\n")


def test_a_script_elsewhere_that_does_not_train_is_left_alone(folder: Path) -> None:
    assert read(folder, f"bash /opt/setup.sh\npython {FLAGS} --lr 1\n").sections["optimizer"]["lr"] == 1


def test_two_trainings_in_one_script_are_refused(folder: Path) -> None:
    (folder / "two.sh").write_text(f"python {FLAGS}\npython {FLAGS} --lr 1\n")
    with pytest.raises(UsageError, match=r"line 1: two.sh starts a training program twice"):
        read(folder, "bash two.sh\n")


def test_a_round_of_a_loop_in_a_script_is_chosen_with_its_variables(folder: Path) -> None:
    (folder / "both.sh").write_text('for MODE in a b; do KIND=$MODE nsys profile "$@"; done\n')
    choice = "$([ $KIND = b ] && echo --deterministic-mode) $(test $KIND = a || echo --seed 8)"
    text = f"bash both.sh bash -c 'python {FLAGS} --lr 1 {choice}'\n"
    with pytest.raises(UsageError, match=r"both.sh starts .* in a loop over MODE; .* --arg MODE=VALUE, such as a$"):
        read(folder, text)
    for mode, training in (("a", {}), ("b", {"deterministic_mode": True, "seed": 8})):
        (folder / "train.sh").write_text(text)
        found = import_script(folder / "train.sh", "train.sh", {"MODE": mode}, NOW).sections["training"]
        assert {key: found[key] for key in found.keys() & {"deterministic_mode", "seed"}} == training


@pytest.mark.parametrize("options", ["", "-q", "-p 2222 -o BatchMode=yes"])
def test_a_training_line_on_another_machine_is_read(options: str, folder: Path) -> None:
    text = f"for node in $(scontrol show hostnames); do ssh {options} $node python {FLAGS} --lr 1; done\n"
    assert read(folder, text).sections["optimizer"]["lr"] == 1
