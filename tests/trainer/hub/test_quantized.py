"""Weights published in fp8 and mxfp4: the numbers of transformers, and folders that import as if they were bfloat16."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.trainer.families.published_models import published
from trainer.conversion.export_hub import Export, export_hub
from trainer.conversion.import_hub import import_hub
from trainer.families.catalogue import FAMILIES
from trainer.hub.errors import HubError
from trainer.hub.folder import HubFolder
from trainer.hub.quantized import unpack_fp8, unpack_mxfp4

pytest.importorskip("transformers")

Tensors = dict[str, Tensor]
BLOCK = (16, 16)


def random_fp8(rows: int, columns: int) -> Tensor:
    """Every finite value of float8_e4m3fn can occur."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # not a number
    return codes.view(torch.float8_e4m3fn)


def test_fp8_gives_the_numbers_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(3)
    elements, scales = random_fp8(256, 384), torch.rand(2, 3) * 1e-2 + 1e-4
    theirs = Fp8Dequantize(None)._dequantize_one(elements, scales, torch.bfloat16)
    ours = unpack_fp8(elements, scales, (128, 128))
    assert ours.dtype == theirs.dtype == torch.bfloat16 and torch.equal(ours, theirs)


def test_fp8_with_blocks_that_are_cut_at_the_edges() -> None:
    torch.manual_seed(4)
    elements, scales = random_fp8(37, 50), torch.rand(3, 4)
    exact = elements.double() * scales.double().repeat_interleave(16, 0)[:37].repeat_interleave(16, 1)[:, :50]
    assert torch.equal(unpack_fp8(elements, scales, BLOCK), exact.float().bfloat16())


def test_mxfp4_gives_the_numbers_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(5)
    blocks = torch.randint(0, 256, (3, 40, 2, 16), dtype=torch.uint8)
    scales = torch.randint(60, 190, (3, 40, 2), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales)
    ours = unpack_mxfp4(blocks, scales).transpose(1, 2)
    assert ours.shape == theirs.shape == (3, 64, 40) and torch.equal(ours, theirs)


def to_fp8(weights: Tensors) -> tuple[Tensors, Tensors]:
    """Quantized as DeepSeek-V3 is published (all products but router and head), and what they stand for."""
    stored, meant = dict(weights), dict(weights)
    for name, weight in weights.items():
        if not name.endswith("_proj.weight") and "kv_a_proj_with_mqa" not in name:
            continue
        grid = [math.ceil(size / 16) for size in weight.shape]
        scales = torch.rand(*grid) * 0.01 + 0.001
        spread = scales.repeat_interleave(16, 0)[: len(weight)].repeat_interleave(16, 1)[:, : weight.shape[1]]
        stored[name] = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        meant[name] = (stored[name].double() * spread.double()).float().bfloat16()
    return stored, meant


def to_mxfp4(weights: Tensors) -> tuple[Tensors, Tensors]:
    """Quantized as gpt-oss is published (the experts' matrices), and what they stand for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, meant = dict(weights), dict(weights)
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, width, rows = weight.shape
        del stored[name]
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, rows, width // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    return stored, meant


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
KINDS: dict[str, tuple[str, Callable[[Tensors], tuple[Tensors, Tensors]], dict[str, object]]] = {
    "fp8": ("deepseek_v3", to_fp8, FP8),
    "mxfp4": ("gpt_oss", to_mxfp4, MXFP4),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Kind -> a quantized folder, and one with the bfloat16 weights that it stands for."""
    found = {}
    for kind, (model_type, quantize, config) in KINDS.items():
        root = tmp_path_factory.mktemp(kind)
        family = next(family for family in FAMILIES if family.model_type == model_type)
        # Blocks of mxfp4 have 32 elements.
        changes = {"intermediate_size": 64} if kind == "mxfp4" else {}
        published(family, **changes).to(torch.bfloat16).save_pretrained(root / "meant")
        stored, meant = quantize(load_file(root / "meant/model.safetensors"))
        save_file(meant, root / "meant/model.safetensors", {"format": "pt"})
        (root / "stored").mkdir()
        save_file(
            {name: t.contiguous() for name, t in stored.items()}, root / "stored/model.safetensors", {"format": "pt"}
        )
        keys = json.loads((root / "meant/config.json").read_text()) | {"quantization_config": config}
        (root / "stored/config.json").write_text(json.dumps(keys))
        found[kind] = (root / "stored", root / "meant")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_folder_imports_as_the_weights_that_it_stands_for(folders, kind, tmp_path) -> None:
    stored, meant = folders[kind]
    for folder, output in ((stored, "a"), (meant, "b")):
        with HubFolder(folder) as source:
            import_hub(source, tmp_path / output, lambda _: None)
    one, other = (load_file(tmp_path / output / "iter_0000000/model_00001.safetensors") for output in "ab")
    assert one.keys() == other.keys()
    assert all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)
    export_hub(Export.open(tmp_path / "a/iter_0000000"), tmp_path / "again", lambda _: None)
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    again, expected = load_file(tmp_path / "again/model.safetensors"), load_file(meant / "model.safetensors")
    assert again.keys() == expected.keys() and all(torch.equal(again[name], expected[name]) for name in again)


def changed(folder: Path, target: Path, change: Callable[[Tensors], object], **keys: object) -> Path:
    """A copy of a folder with other tensors and keys."""
    target.mkdir()
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | keys
    (target / "config.json").write_text(json.dumps(values))
    return target


FP8_WEIGHT = "model.layers.0.self_attn.o_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
PROBLEMS = {
    "no scale": ("fp8", lambda w: w.pop(f"{FP8_WEIGHT}_scale_inv"), {}, f"there is no {FP8_WEIGHT}_scale_inv"),
    "other blocks": ("fp8", len, {"quantization_config": {**FP8, "weight_block_size": [8, 8]}}, "in blocks of 8 x 8"),
    "no blocks": ("fp8", len, {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size None"),
    "no 4-bit scale": ("mxfp4", lambda w: w.pop(f"{EXPERTS}_scales"), {}, f"there is no {EXPERTS}_scales"),
    "another kind": ("fp8", len, {"quantization_config": {"quant_method": "gptq"}}, "quantized by gptq"),
    "of ModelOpt": ("fp8", len, {"quantization_config": {"quant_algo": "FP8"}}, "by FP8, .* take the model's files in"),
    "of MLX": ("fp8", len, {"quantization_config": {"bits": 4}}, "quantized by a method without a name"),
    "no config": ("fp8", len, {"quantization_config": None}, "F8_E4M3|weight_scale_inv"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_does_not_fit_is_named(folders, tmp_path, name) -> None:
    kind, change, keys, message = PROBLEMS[name]
    with pytest.raises(HubError, match=message) as caught:
        HubFolder(changed(folders[kind][0], tmp_path / "hub", change, **keys))
    assert "\n" not in str(caught.value)
