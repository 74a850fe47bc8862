"""Faults that converters have had without any message: each value below was once lost, or written as another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.families.published_models import published
from trainer.commands import checkpoint as command
from trainer.conversion.verify import verify_export
from trainer.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from trainer.families.format.family import Family
from trainer.families.gemma2 import GEMMA2
from trainer.families.gpt2 import GPT2
from trainer.families.llama import LLAMA
from trainer.families.t5 import T5

pytest.importorskip("transformers")

_LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 16}
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3 with a factor that is not 8": {
        **_LLAMA3,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "llama3 with other bounds than 1 and 4": {
        **_LLAMA3,
        "factor": 8.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 2.0,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
}


def there_and_back(folder: Path, root: Path) -> tuple[Path, Path]:
    """The checkpoint of a folder, and the export of the checkpoint."""
    assert command.main(["import", str(folder), "--output", str(root / "native")]) == 0
    assert command.main(["export", str(root / "native"), "--output", str(root / "again"), "--no-verify"]) == 0
    return root / "native/iter_0000000", root / "again"


def keys_of(folder: Path) -> dict[str, Any]:
    """Content of config.json."""
    keys: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return keys


def change_keys(folder: Path, **changes: Any) -> None:
    """Change config.json."""
    (folder / "config.json").write_text(json.dumps(keys_of(folder) | changes))


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_is_the_given_one_in_both_directions(tmp_path, name: str) -> None:
    scaling = {"rope_theta": 500.0, **SCALINGS[name]}
    published(LLAMA, rope_parameters=scaling).save_pretrained(tmp_path / "hub")
    checkpoint, again = there_and_back(tmp_path / "hub", tmp_path)
    # The import by the original folder, the export by transformers.
    assert verify_export(checkpoint, tmp_path / "hub").is_good
    assert verify_export(checkpoint, again).is_good
    keys = keys_of(again)
    assert {key: keys["rope_parameters"][key] for key in scaling} == scaling
    assert {key: keys["rope_scaling"][key] for key in SCALINGS[name]} == SCALINGS[name]


def test_the_router_bias_is_neither_dropped_nor_zero_nor_rounded(tmp_path) -> None:
    published(DEEPSEEK_V3).to(torch.bfloat16).save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub/model.safetensors"
    weights = load_file(file)
    biases = [name for name in weights if name.endswith("e_score_correction_bias")]
    assert len(biases) == DEEPSEEK_V3.tiny["num_hidden_layers"] - 1
    for name in biases:
        weights[name] = torch.randn(weights[name].shape, dtype=torch.float32)
    save_file(weights, file, {"format": "pt"})
    checkpoint, again = there_and_back(tmp_path / "hub", tmp_path)
    found = load_file(again / "model.safetensors")
    for name in biases:
        assert found[name].dtype == torch.float32 and torch.equal(found[name], weights[name])
    assert verify_export(checkpoint, tmp_path / "hub").is_good


@pytest.mark.parametrize("family", [DEEPSEEK_V2, DEEPSEEK_V3], ids=lambda family: family.name)
def test_the_coefficient_of_the_loss_per_sequence_is_told_and_kept(tmp_path, capsys, family: Family) -> None:
    published(family).save_pretrained(tmp_path / "hub")
    change_keys(tmp_path / "hub", aux_loss_alpha=0.003, seq_aux=True)
    _, again = there_and_back(tmp_path / "hub", tmp_path)
    told = capsys.readouterr().err
    assert "note: " in told and "aux_loss_alpha 0.003 weighs a balance loss over each sequence" in told
    assert (keys_of(again)["aux_loss_alpha"], keys_of(again)["seq_aux"]) == (0.003, True)


def test_windows_and_soft_caps_are_neither_dropped_nor_given_to_other_layers(tmp_path) -> None:
    """Layers with other windows than a converter's own rule, and caps that are not the published ones."""
    given = {
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 17,
    }
    published(GEMMA2, **given).save_pretrained(tmp_path / "hub")
    checkpoint, again = there_and_back(tmp_path / "hub", tmp_path)
    assert {key: keys_of(again)[key] for key in given} == given
    assert verify_export(checkpoint, tmp_path / "hub").is_good


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_tied_head_is_written_once_and_an_untied_one_is_not_lost(tmp_path, is_tied: bool) -> None:
    published(LLAMA, tie_word_embeddings=is_tied).save_pretrained(tmp_path / "hub")
    checkpoint, again = there_and_back(tmp_path / "hub", tmp_path)
    assert ("lm_head.weight" in load_file(again / "model.safetensors")) is not is_tied
    assert keys_of(again)["tie_word_embeddings"] is is_tied
    assert verify_export(checkpoint, tmp_path / "hub").is_good


@pytest.mark.parametrize("given", [None, 3])
def test_an_export_of_t5_says_what_its_decoder_begins_with(tmp_path, given: int | None) -> None:
    published(T5, pad_token_id=0).save_pretrained(tmp_path / "hub")
    (tmp_path / "hub/generation_config.json").unlink()
    change_keys(tmp_path / "hub", decoder_start_token_id=given)
    _, again = there_and_back(tmp_path / "hub", tmp_path)
    generation = json.loads((again / "generation_config.json").read_text())
    for keys in (keys_of(again), generation):
        assert (keys["pad_token_id"], keys["decoder_start_token_id"]) == (0, given or 0)


def test_other_families_begin_with_no_token_of_a_decoder(tmp_path) -> None:
    published(GPT2).save_pretrained(tmp_path / "hub")
    _, again = there_and_back(tmp_path / "hub", tmp_path)
    assert "decoder_start_token_id" not in keys_of(again)
