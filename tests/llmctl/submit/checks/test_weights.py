"""Hugging Face folders whose weights cannot be read are refused before the queue, in a dry run too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from llmctl.cli.main import main

KEYS = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6},
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64, "tie_word_embeddings": False},
}
CONFIG: dict[str, Any] = {
    "training": {"train_iters": 2, "seq_length": 16, "micro_batch_size": 1, "device": "cpu"},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
    "checkpoint": {"load": "hf"},
}
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]

Submit = Callable[[], tuple[int, str]]


@pytest.fixture
def hub(home: Path) -> Path:
    """A folder with weights in two files; only names, sizes and headers matter."""
    folder = home / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(KEYS))
    for shard in SHARDS:
        save_file({shard: torch.zeros(40, 50)}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": {shard: shard for shard in SHARDS}}))
    (home / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    return folder


@pytest.fixture
def submit(capsys: pytest.CaptureFixture[str]) -> Submit:
    """A dry run; returns exit code and messages."""

    def run() -> tuple[int, str]:
        code = main(["submit", "--cluster", "local", "--dry-run", "c.yaml"])
        return code, capsys.readouterr().err

    return run


def test_a_whole_folder_passes(hub: Path, submit: Submit) -> None:
    code, told = submit()
    assert code == 0, told
    for name in (INDEX, *SHARDS):
        (hub / name).unlink()
    save_file({"w": torch.zeros(3)}, hub / "model.safetensors")
    assert submit()[0] == 0


def test_absent_weights_are_told(hub: Path, submit: Submit) -> None:
    (hub / SHARDS[1]).unlink()
    code, told = submit()
    assert (
        code == 3 and f"hf: 1 of the 2 files that {INDEX} names are missing, {SHARDS[1]} first; download them" in told
    )
    for name in (INDEX, SHARDS[0]):
        (hub / name).unlink()
    code, told = submit()
    assert code == 3 and "hf: has config.json, but no weights: model.safetensors, or " in told


@pytest.mark.parametrize(
    ("size", "says"), [(8000, "has 8,000 of 8,"), (20, "is cut or not a safetensors file"), (0, "is cut or not")]
)
def test_a_cut_file_is_told_with_both_sizes(hub: Path, submit: Submit, size: int, says: str) -> None:
    path = hub / SHARDS[1]
    path.write_bytes(path.read_bytes()[:size])
    code, told = submit()
    assert code == 3 and f"hf/{SHARDS[1]}: {says}" in told and "download it again" in told


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "its weights are quantized by gptq, which is not read; take the model's"),
        ({"quant_method": "fp8"}, "quantization_config has weight_block_size None, but fp8 is read only with"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ""),
    ],
)
def test_quantized_weights_are_told(hub: Path, submit: Submit, config: dict[str, Any], says: str) -> None:
    (hub / "config.json").write_text(json.dumps({**KEYS, "quantization_config": config}))
    code, told = submit()
    assert code == (3 if says else 0), told
    assert says in told
