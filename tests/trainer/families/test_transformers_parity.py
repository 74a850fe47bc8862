"""Every family against the model of transformers with the same weights: logits, loss, gradient of every parameter."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.families.proofs import record
from tests.trainer.families.published_models import (
    Text,
    built,
    logits,
    loss_and_gradients,
    published,
    published_logits,
    published_loss_and_gradients,
    save,
)
from trainer.families.catalogue import FAMILIES, OTHER_NAMES, describes, family_of_model, read_model
from trainer.families.format.family import Family
from trainer.hub.folder import HubFolder

pytest.importorskip("transformers")

# Rounding of float32 in another order, through a few layers; relative to the largest element.
BOUND = 1e-5
# tests/trainer/families/test_bert_parity.py has the families with several heads.
ONE_HEAD = [family for family in FAMILIES if not family.heads]
# transformers has no class for kimi_k2; a variant of DeepSeek-V3 has its positions and its one group of experts.
UNDER_OTHER_NAMES = [family for family in OTHER_NAMES if family.model_type != "kimi_k2"]
KIMI_ROPE = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}
KIMI_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16}
VARIANTS = [
    *((family, {}) for family in (*ONE_HEAD, *UNDER_OTHER_NAMES)),
    *(
        (family, changes)
        for family in ONE_HEAD
        for changes in {
            "llama": [{"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": None}],
            # Moonlight's, but larger: the norms of latents keep their own.
            "deepseek_v3": [
                {"rms_norm_eps": 1e-2},
                {"rope_parameters": KIMI_ROPE, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
            ],
            "opt": [{"do_layer_norm_before": True, "word_embed_proj_dim": 32}],
            "gpt_neox": [{"use_parallel_residual": False, "hidden_act": "gelu_new"}],
            # The first T5: no gates, the word table as output table, stacks of equal depth.
            "t5": [{"feed_forward_proj": "relu", "tie_word_embeddings": True, "num_decoder_layers": None}],
            "gemma": [{"attention_bias": True, "hidden_act": "gelu"}],
            # No scaling: one table of angles for all layers.
            "olmo3": [{"rope_parameters": None, "attention_bias": True}],
            "olmoe": [{"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 8}],
            "glm4": [{"attention_bias": False, "partial_rotary_factor": 1.0, "tie_word_embeddings": True}],
            "ministral": [{"layer_types": None, "tie_word_embeddings": True}],
            "seed_oss": [{"attention_bias": True, "attention_out_bias": False}],
            "starcoder2": [{"use_bias": False, "tie_word_embeddings": False, "sliding_window": None}],
            # The tiny model's rows take the short factors; these the long ones.
            "phi3": [{"original_max_position_embeddings": 16, "sliding_window": 5}, {"rope_scaling": None}],
            "smollm3": [
                {"no_rope_layers": None, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5},
                {"no_rope_layers": [1, 1, 1, 1], "attention_bias": True, "tie_word_embeddings": True},
            ],
            "granite": [{"attention_bias": True, "embedding_multiplier": 1.0, "tie_word_embeddings": False}],
            "qwen2_moe": [
                {"norm_topk_prob": True, "qkv_bias": False, "decoder_sparse_step": 2, "mlp_only_layers": []},
                {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
            ],
            "qwen3_moe": [{"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}],
        }.get(family.model_type, [])
    ),
]


@pytest.mark.parametrize(
    ("family", "changes"), VARIANTS, ids=[f"{family.name}{' variant' * bool(c)}" for family, c in VARIANTS]
)
def test_logits_loss_and_gradients_equal_those_of_transformers(family: Family, changes: dict, tmp_path) -> None:
    witness = published(family, **changes)
    text = Text.random(witness.config.vocab_size)
    with HubFolder(save(witness, tmp_path / "weights")) as folder:
        ours = built(folder)
        with torch.no_grad():
            theirs = published_logits(witness, text)
        assert float((logits(ours, folder, text) - theirs).abs().max() / theirs.abs().max()) < BOUND
        loss, gradients = loss_and_gradients(ours, folder, text)
        their_loss, their_gradients = published_loss_and_gradients(witness, text)
        assert abs(loss - their_loss) < BOUND * their_loss
        # Their own writer takes apart what they keep in one parameter.
        with HubFolder(save(witness, tmp_path / "gradients", their_gradients)) as expected:
            assert gradients
            off = {name: _distance(gradient, expected.read_theirs(name)) for name, gradient in gradients.items()}
            assert {name: value for name, value in off.items() if not value < 10 * BOUND} == {}
            parameters = {name for rule in folder.weights.values() if rule.is_parameter for name in rule.theirs}
            assert parameters == gradients.keys()
    record(family.name, "transformers")


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    largest = float(theirs.abs().max())
    # A key's bias has no gradient but rounding.
    return float((ours - theirs).abs().max()) / max(largest, 1e-3)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_config_survives_both_directions(family: Family) -> None:
    """Our keys -> config.json -> our keys; and transformers reads what we write."""
    from transformers import AutoConfig

    _, model = read_model({"model_type": family.model_type, **family.tiny}, "config.json")
    assert describes(family, model)
    assert family_of_model(model).model_type == family.model_type
    assert model.vocab_size is not None and model.max_position_embeddings is not None
    keys = family.write_config(model, model.vocab_size, model.max_position_embeddings)
    config = AutoConfig.for_model(family.model_type, **keys)
    _, again = read_model({**config.to_dict(), "architectures": [family.architecture]}, "config.json")
    assert again.model_dump() == model.model_dump()
