"""Programs in front of the training program, and the defaults of pretrain_bert.py and pretrain_t5.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.llmctl.scripts.test_import_script import FLAGS, read
from trainer.planning.build_config import build_config

DATA = FLAGS.replace("--mock-data", "--data-path d") + " --micro-batch-size 1"
T5_DATA = f"{DATA} --decoder-seq-length 32"


def found(program: str, flags: str, folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Section data, and the remarks."""
    given = T5_DATA if program == "pretrain_t5" else DATA
    imported = read(f"torchrun {program}.py {given} {flags}", folder)
    return dict(imported.sections["data"]), imported.remarks


@pytest.mark.parametrize(
    ("program", "flags", "kind", "extra_ids"),
    [
        ("pretrain_bert", "--vocab-file v.txt", "BertWordPieceLowerCase", None),
        ("pretrain_bert", "--vocab-file v.txt --tokenizer-type BertWordPieceCase", "BertWordPieceCase", None),
        ("pretrain_t5", "--vocab-file v.txt", "BertWordPieceLowerCase", 100),
        ("pretrain_t5", "--vocab-file v.txt --vocab-extra-ids 200", "BertWordPieceLowerCase", 200),
        ("pretrain_t5", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t", "HuggingFaceTokenizer", None),
        ("pretrain_gpt", "--vocab-file v.json --merge-file m.txt", None, None),
    ],
)
def test_the_tokenizer_that_megatron_takes(
    program: str, flags: str, kind: str | None, extra_ids: int | None, tmp_path: Path
) -> None:
    data, remarks = found(program, flags, tmp_path)
    assert (data.get("tokenizer_type"), data.get("vocab_extra_ids")) == (kind, extra_ids)
    assert any("has 100 sentinels" in remark for remark in remarks) is (extra_ids == 100)


# megatron/training/arguments.py: position_embedding_type learned_absolute, normalization LayerNorm, add_bias_linear
# True; T5LMHead has a bias with tied embeddings only.
T5 = {
    "architecture": "t5",
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "disable_bias_linear": False,
    "stack_output_dropout": False,
    "add_head_bias": True,
    "scale_decoder_output": False,
}
RELATIVE = {
    "position_embedding_type": "relative",
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 64,
}


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("", {}),
        (
            "--position-embedding-type relative --relative-attention-num-buckets 16 "
            "--relative-attention-max-distance 64",
            RELATIVE,
        ),
        ("--use-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        (
            "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights",
            {"normalization": "RMSNorm", "disable_bias_linear": True, "untie_embeddings_and_output_weights": True}
            | dict.fromkeys(("add_head_bias", "scale_decoder_output")),
        ),
    ],
    ids=["defaults", "relative", "rope", "untied"],
)
def test_the_t5_that_megatron_trains(flags: str, changes: dict[str, Any], tmp_path: Path) -> None:
    given = f"{T5_DATA} --vocab-file v.txt --vocab-extra-ids 100 {flags}"
    imported = read(f"torchrun pretrain_t5.py {given}", tmp_path)
    model = imported.sections["model"]
    assert {key: model.get(key) for key in T5 | changes} == T5 | changes
    assert imported.remarks == ()


@pytest.mark.parametrize(
    ("program", "flags", "activation"),
    [
        *((program, "", "gelu_tanh") for program in ("pretrain_gpt", "pretrain_bert", "pretrain_t5")),
        ("pretrain_gpt", "--no-bias-gelu-fusion", "gelu"),
        ("pretrain_gpt", "--disable-bias-linear", "gelu"),
        ("pretrain_gpt", "--activation-func gelu", "gelu"),
        ("pretrain_gpt", "--squared-relu", "squared_relu"),
        ("pretrain_gpt", "--swiglu", "silu"),
        ("pretrain_gpt", "--glu-activation geglu", "gelu"),
    ],
)
def test_a_gelu_that_megatron_fuses_with_its_bias_is_the_approximation(
    program: str, flags: str, activation: str, tmp_path: Path
) -> None:
    given = T5_DATA if program == "pretrain_t5" else DATA
    imported = read(f"torchrun {program}.py {given} --vocab-file v.txt {flags}", tmp_path)
    assert build_config(imported.sections).model.activation == activation


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
def test_programs_in_front_give_the_sizes_of_the_job(line: str, nodes: int, gpus: int, tmp_path: Path) -> None:
    sections = read(f"{line} {FLAGS} --micro-batch-size 1 --global-batch-size 8", tmp_path).sections
    assert sections["model"]["num_layers"] == 2
    assert (sections["job"].get("nodes", 1), sections["job"]["gpus_per_node"]) == (nodes, gpus)


@pytest.mark.parametrize(
    ("flags", "granularity"),
    [
        ("--activations-checkpoint-method uniform", "full"),
        ("--activations-checkpoint-method uniform --recompute-granularity full", "full"),
        ("--checkpoint-activations --activations-checkpoint-method block", "full"),
    ],
)
def test_a_method_of_checkpointing_alone_computes_whole_layers_again(
    flags: str, granularity: str, tmp_path: Path
) -> None:
    sections = read(f"torchrun pretrain_gpt.py {DATA} {flags}", tmp_path).sections
    assert sections["training"]["recompute_granularity"] == granularity
