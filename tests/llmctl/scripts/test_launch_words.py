"""Programs in front of the training program: each is read, and its sizes are those of the job."""

from datetime import datetime
from pathlib import Path

import pytest

from llmctl.scripts.import_script import import_script

NOW = datetime(2026, 1, 2, 3, 4, 5)
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 8"
    " --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


@pytest.mark.parametrize(
    ("line", "nodes", "gpus"),
    [
        ("torchrun --nproc_per_node 4 -m pretrain_gpt", 1, 4),
        ("torchrun --nproc_per_node=4 --module megatron.pretrain_gpt", 1, 4),
        ("torchrun --nproc_per_node 4 --no_python python -m megatron.pretrain_gpt", 1, 4),
        ("timeout -k 30 --signal=TERM 5h torchrun --nproc_per_node 4 pretrain_gpt.py", 1, 4),
        (
            "nsys profile -s none -t nvtx,cuda -o out -f true torchrun --nproc_per_node 4 pretrain_gpt.py",
            1,
            4,
        ),
        ("accelerate launch --num_machines 2 --num_processes 8 --machine_rank 0 --multi_gpu pretrain_gpt.py", 2, 4),
        ("python -m accelerate.commands.launch --num_machines 2 --num_processes 8 -m pretrain_gpt", 2, 4),
        ("aprun -n 8 -N 4 -cc depth python ./pretrain_gpt.py", 2, 4),
        ("conda run -n megatron --no-capture-output torchrun --nproc_per_node 4 pretrain_gpt.py", 1, 4),
    ],
)
def test_launch_words(line: str, nodes: int, gpus: int, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/bash\n{line} {FLAGS}\n")
    sections = import_script(script, "train.sh", {}, NOW).sections
    assert sections["model"]["num_layers"] == 2
    assert (sections["job"].get("nodes", 1), sections["job"]["gpus_per_node"]) == (nodes, gpus)
