"""Prediction layers (MTP) of DeepSeek-V3: the same bits both ways; their copies of tables; left out only when asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.families.published_models import built, published
from trainer.commands import checkpoint as command
from trainer.conversion.export_hub import Export, export_hub
from trainer.conversion.import_hub import import_hub
from trainer.conversion.verify import verify_export
from trainer.families.deepseek import DEEPSEEK_V3
from trainer.hub.folder import HubFolder

pytest.importorskip("transformers")

FURTHER = "model.layers.4."  # The tiny model has layers 0 to 3.
TABLES = {
    f"{FURTHER}embed_tokens.weight": "model.embed_tokens.weight",
    f"{FURTHER}shared_head.head.weight": "lm_head.weight",
}


def ignore(_: int) -> None:
    """Reports no progress."""


@pytest.fixture(scope="module")
def saved_by_transformers(tmp_path_factory) -> Path:
    """A tiny DeepSeek-V3 as transformers saves it: its config.json counts a prediction layer, without tensors."""
    folder: Path = tmp_path_factory.mktemp("saved") / "hub"
    published(DEEPSEEK_V3, num_nextn_predict_layers=1).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tensors(saved_by_transformers) -> dict[str, torch.Tensor]:
    """The tensors as DeepSeek publishes them, with the names of README_WEIGHTS.md of deepseek-ai/DeepSeek-V3."""
    found = load_file(saved_by_transformers / "model.safetensors")
    generator = torch.Generator().manual_seed(11)
    shapes = {
        name.replace("layers.3.", "layers.4."): (tensor.shape, tensor.dtype)
        for name, tensor in found.items()
        if "layers.3." in name
    }
    for name, shape in {"enorm": (32,), "hnorm": (32,), "shared_head.norm": (32,), "eh_proj": (32, 64)}.items():
        shapes[f"{FURTHER}{name}.weight"] = (torch.Size(shape), torch.bfloat16)
    for name, (shape, dtype) in shapes.items():
        found[name] = torch.randn(shape, generator=generator).to(dtype)
    return found | {name: found[original].clone() for name, original in TABLES.items()}


def write(folder: Path, source: Path, tensors: dict[str, torch.Tensor], **keys: object) -> Path:
    """A folder with these tensors, and the config.json of ``source`` with changes."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | keys))
    return folder


@pytest.fixture
def hub(saved_by_transformers, tensors, tmp_path) -> Path:
    """A folder as DeepSeek publishes it."""
    return write(tmp_path / "hub", saved_by_transformers, tensors)


def test_an_export_has_the_bits_of_its_import(hub, tensors, tmp_path) -> None:
    with HubFolder(hub) as source:
        assert source.model.mtp_num_layers == 1
        checkpoint = import_hub(source, tmp_path / "native", ignore)
        model = built(source)
    for ours, theirs in {"merge": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm"}.items():
        found = model.parameters[f"layers.4.{ours}.weight"].detach()
        assert torch.equal(found, tensors[f"{FURTHER}{theirs}.weight"].float())
    count = export_hub(Export.open(checkpoint), tmp_path / "again", ignore)
    after = load_file(tmp_path / "again/model.safetensors")
    assert after.keys() == tensors.keys() and count == len(tensors)
    assert all(torch.equal(after[name], tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "again/config.json").read_text())["num_nextn_predict_layers"] == 1
    assert verify_export(checkpoint, tmp_path / "again").is_good


def test_prediction_layers_are_left_out_only_when_asked(hub, tensors, tmp_path, capsys) -> None:
    assert command.main(["import", str(hub), "--output", str(tmp_path / "native"), "--drop-mtp"]) == 0
    dropped = [name for name in tensors if name.startswith(FURTHER)]
    assert f"leaving out {len(dropped)} tensors of prediction layers" in capsys.readouterr().out
    assert command.main(["export", str(tmp_path / "native"), "--output", str(tmp_path / "again"), "--no-verify"]) == 0
    assert load_file(tmp_path / "again/model.safetensors").keys() == tensors.keys() - set(dropped)
    assert json.loads((tmp_path / "again/config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_folder_without_their_tensors_is_read_without_them_and_says_so(
    saved_by_transformers, hub, tmp_path, capsys
) -> None:
    assert json.loads((saved_by_transformers / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with HubFolder(saved_by_transformers) as source:
        assert source.model.mtp_num_layers == 0
    assert command.main(["import", str(saved_by_transformers), "--output", str(tmp_path / "native")]) == 0
    assert "counts 1 prediction layers (MTP), but the files hold no tensor" in capsys.readouterr().err
    with HubFolder(hub) as source:
        assert source.notes == []


@pytest.mark.parametrize("copy", TABLES)
def test_a_copy_that_differs_is_named(saved_by_transformers, tensors, tmp_path, capsys, copy: str) -> None:
    other = tensors[copy].clone()
    other[7, 5] += 1.0
    write(tmp_path / "hub", saved_by_transformers, {**tensors, copy: other})
    assert command.main(["import", str(tmp_path / "hub"), "--output", str(tmp_path / "native")]) == 3
    assert f"{copy} differs from {TABLES[copy]}" in capsys.readouterr().err
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize(
    ("missing", "keys", "message"),
    [
        ("eh_proj.weight", {}, f"has no tensor {FURTHER}eh_proj.weight"),
        (None, {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers of config.json does not count"),
    ],
)
def test_bad_input_is_named(saved_by_transformers, tensors, tmp_path, capsys, missing, keys, message) -> None:
    kept = {name: tensor for name, tensor in tensors.items() if name != f"{FURTHER}{missing}"}
    write(tmp_path / "hub", saved_by_transformers, kept, **keys)
    assert command.main(["import", str(tmp_path / "hub"), "--output", str(tmp_path / "native")]) == 3
    assert message in capsys.readouterr().err


def test_a_file_that_counts_none_and_holds_none_is_read_without_a_note(saved_by_transformers, hub) -> None:
    """In transformers the absence of the count means one layer, so that tensors of one are read."""
    for folder, layers in ((saved_by_transformers, 0), (hub, 1)):
        file = folder / "config.json"
        keys = json.loads(file.read_text())
        file.write_text(json.dumps({key: value for key, value in keys.items() if "num_nextn" not in key}))
        with HubFolder(folder) as source:
            assert source.model.mtp_num_layers == layers and source.notes == []
        file.write_text(json.dumps(keys))
