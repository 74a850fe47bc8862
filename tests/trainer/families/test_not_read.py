"""Models that are not read or written: refused by the part that is not computed or has no family."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.sections.model import ModelConfig
from trainer.families.catalogue import family_of_model, read_model
from trainer.families.format.errors import FamilyError


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        (
            "qwen3_next",
            "has layers of linear attention, which this trainer does not compute; use a model of one of the",
        ),
        ("nemotron_h", "has state-space layers, which this trainer does not compute; use a model of one of the types"),
        ("granitemoehybrid", "has state-space layers, which this trainer does not compute; take a Granite 4 whose"),
        ("rwkv", "has recurrent layers, which"),
        ("lfm2", "has convolutions in the place of attention, which"),
        ("gemma3n", "has a part for images or sound beside its text model, which"),
        ("deepseek_v32", "has attention to the tokens that an indexer chooses, which"),
        ("mpt", "has biases of attention by distance (ALiBi) in layers other than BLOOM's, which"),
        ("phi-msft", "is Phi for Microsoft's first code, which this trainer does not read; take the present files"),
        ("internlm2", "is InternLM2 with queries, keys and values in one tensor, which this trainer does not read"),
        ("fancy", "is not a family known here; use a model of one of the types that are read: "),
    ],
)
def test_a_model_that_is_not_computed_is_refused_with_its_reason(model_type: str, reason: str) -> None:
    with pytest.raises(FamilyError) as caught:
        read_model({"model_type": model_type, "num_hidden_layers": 4}, "config.json")
    assert f"model_type {model_type!r} {reason}" in str(caught.value)
    assert str(caught.value).startswith("config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sign", "part"),
    [
        ({"vision_config": {"hidden_size": 16}}, "a part for images or sound"),
        ({"linear_num_key_heads": 4}, "layers of linear attention"),
        ({"mamba_d_state": 16}, "state-space layers"),
        ({"index_topk": 2048}, "attention to the tokens that an indexer chooses"),
        ({"alibi": True}, "biases of attention by distance"),
    ],
)
def test_a_model_of_a_new_type_is_refused_by_the_keys_of_its_parts(sign: dict[str, Any], part: str) -> None:
    with pytest.raises(FamilyError, match=f"model_type 'new' has {part}"):
        read_model({"model_type": "new", **sign}, "config.json")
    with pytest.raises(FamilyError, match="model_type 'new' is not a family known here"):
        read_model({"model_type": "new", **dict.fromkeys(sign)}, "config.json")


def test_a_text_model_of_another_family_beside_images_is_refused() -> None:
    keys = {"model_type": "mistral3", "text_config": {"model_type": "llama"}}
    with pytest.raises(FamilyError, match=r"text_config is 'llama'; a model of mistral3 is read with mistral or minis"):
        read_model(keys, "config.json")


@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_megatrons_t5_is_not_written(positions: Any) -> None:
    model = ModelConfig(
        architecture="t5",
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        position_embedding_type=positions,
        add_head_bias=True,
        scale_decoder_output=False,
    )
    sentence = (
        "no published family has this model section, so that no program could read an export; the nearest is T5, "
        rf"with model.position_embedding_type relative \(here {positions}\), "
    )
    with pytest.raises(FamilyError, match=sentence):
        family_of_model(model)
