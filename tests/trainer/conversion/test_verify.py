"""The comparison of logits: the length of its text, its memory, and the imports that it finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.families.published_models import published
from trainer.commands import checkpoint as command
from trainer.conversion import witness
from trainer.conversion.bounded_model import Weights, build_bounded_model
from trainer.conversion.import_hub import config_of
from trainer.conversion.verify import BOUND, Verification, fixed_text, verify_export
from trainer.families.catalogue import FAMILIES
from trainer.families.format.hub_config import HubConfig
from trainer.families.llama import LLAMA
from trainer.families.mistral import MISTRAL
from trainer.hub.folder import HubFolder
from trainer.pipeline.executor import forward_logits
from trainer.planning.build_config import build_config

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SCALED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def saved(family: Any, folder: Path, **changes: Any) -> Path:
    """The family's tiny model as transformers saves it."""
    published(family, **changes).save_pretrained(folder)
    return folder


def imported(folder: Path, root: Path) -> Path:
    """The checkpoint of a folder, whose logits must be equal."""
    assert command.main(["import", str(folder), "--output", str(root / "native")]) == 0
    return root / "native/iter_0000000"


def test_an_import_compares_logits(tmp_path, capsys) -> None:
    imported(saved(LLAMA, tmp_path / "hub"), tmp_path)
    assert "logits of 64 tokens by transformers" in capsys.readouterr().out


def test_an_import_that_reads_a_key_wrongly_fails(tmp_path, capsys, monkeypatch) -> None:
    folder, take = saved(LLAMA, tmp_path / "hub"), HubConfig.take

    def take_wrongly(keys: HubConfig, key: str, **how: Any) -> Any:
        found = take(keys, key, **how)
        return 0.5 if key == "rms_norm_eps" else found

    monkeypatch.setattr(HubConfig, "take", take_wrongly)
    assert command.main(["import", str(folder), "--output", str(tmp_path / "native")]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
    assert command.main(["import", str(folder), "--output", str(tmp_path / "other"), "--no-verify"]) == 0
    assert "logits" not in capsys.readouterr().out


def test_an_import_without_a_witness_says_so(tmp_path, capsys, monkeypatch) -> None:
    folder = saved(LLAMA, tmp_path / "hub")
    monkeypatch.setattr(command, "has_witness", lambda: False)
    imported(folder, tmp_path)
    assert "the logits were not compared: transformers is not installed" in capsys.readouterr().err


def test_transformers_is_not_asked_for_what_it_computes_wrongly(tmp_path, monkeypatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    families = {family.model_type: family for family in FAMILIES}
    for name, changes, fault in (
        ("deepseek_v2", {}, " (transformers 4.57.6 leaves out mscale_all_dim of deepseek_v2)"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}, " (transformers 4"),
    ):
        folder = saved(families[name], tmp_path / name / "hub", **changes)
        found = verify_export(imported(folder, tmp_path / name), folder)
        assert found.is_good and found.witness.startswith(f"this trainer's own import{fault}")


def test_a_window_of_another_size_is_found(tmp_path) -> None:
    """The text is longer than the window."""
    folder = saved(MISTRAL, tmp_path / "hub", sliding_window=200, max_position_embeddings=512)
    checkpoint = imported(folder, tmp_path)
    found = verify_export(checkpoint, folder)
    assert found.is_good and found.tokens == 232
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    keys = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**keys, "sliding_window": 150}))
    assert not verify_export(checkpoint, other).is_good


def test_a_long_window_is_compared_with_another_attention(tmp_path) -> None:
    """Without the scores of all pairs of tokens in memory."""
    folder = saved(MISTRAL, tmp_path / "hub", sliding_window=600, max_position_embeddings=1024)
    assert verify_export(imported(folder, tmp_path), folder).tokens == 632 > witness.LONGEST_WITH_SCORES


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        ({}, 64),
        ({"max_position_embeddings": 48}, 48),
        ({"window_size": 128}, 160),
        ({"window_size": 4096}, 4128),
        ({"window_size": 4096, "window_layers": [False, False]}, 64),
        ({"window_size": 4096, "attn_logit_softcapping": 50.0}, 64),
        ({"window_size": 8192}, 64),
        ({"rope_scaling": {**SCALED, "original_max_position_embeddings": 1024}}, 1056),
        ({"window_size": 4096, "hidden_size": 16384, "num_layers": 16}, 64),
    ],
)
def test_length_of_the_text(model: dict[str, Any], tokens: int) -> None:
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "position_embedding_type": "rope"}
    training = {"train_iters": 1, "seq_length": 32}
    values = {"max_position_embeddings": 16384, **shape, **model}
    config = build_config({"model": values, "training": training, "optimizer": {"lr": 1e-3}})
    assert fixed_text(config, 100).shape == (1, tokens)


def test_the_bound_grows_with_the_rounding_of_positions() -> None:
    short, long = (Verification("transformers", 5 * BOUND, 1, tokens) for tokens in (64, 4128))
    assert not short.is_good and long.is_good
    assert not Verification("transformers", 10 * BOUND, 1, 4128).is_good
    assert not Verification("transformers", float("nan"), 1, 64).is_good


def test_layers_of_ours_have_weights_only_while_they_compute(tmp_path) -> None:
    folder = saved(LLAMA, tmp_path / "hub")
    with HubFolder(folder) as source:
        shapes = {name: source.shape(name) for name in source.weights}
        read = lambda name: torch.cat([source.read(name, piece) for piece in source.pieces(name)])  # noqa: E731
        model = build_bounded_model(config_of(source, None), source.vocab_size, Weights(folder, shapes, read))
        layers = list(model.chunks[0].layers)  # type: ignore[arg-type]
        full: list[list[bool]] = []

        def note(*_: Any) -> None:
            full.append([any(weight.numel() for weight in layer.parameters()) for layer in layers])

        for layer in layers[1:]:
            layer.register_forward_pre_hook(note)
        forward_logits(model, torch.ones(1, 4, dtype=torch.int64))
    assert full == [[place >= one for place in range(len(layers))] for one in range(1, len(layers))]


@pytest.mark.parametrize("name", ["llama", "mixtral", "bert", "t5"])
def test_layers_of_the_witness_have_weights_only_while_they_compute(name: str, tmp_path) -> None:
    import transformers

    family = next(family for family in FAMILIES if family.model_type == name)
    folder = saved(family, tmp_path / "hub")
    with witness._loaded(folder, getattr(transformers, family.auto_class), True, tmp_path) as model:
        lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
        on_disk = {parameter.is_meta for name, parameter in model.named_parameters() if name.startswith(tuple(lists))}
    assert on_disk == {True}
    assert [entry.name for entry in tmp_path.iterdir()] == ["hub"]
