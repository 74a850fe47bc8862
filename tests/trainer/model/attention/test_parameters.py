"""Biases of attention layers, and a given scale: what no published model of the tests has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.model.attention.attention_layer import CPU, LATENT, LENGTH, attend, model_config
from trainer.model.attention.latent_attention import LatentAttention
from trainer.model.attention.self_attention import SelfAttention
from trainer.model.rotary import RotaryTable


@pytest.mark.parametrize(
    ("keys", "biases"),
    [
        ({"add_attention_output_bias": True}, {"projection.bias"}),
        ({**LATENT, "add_attention_output_bias": True}, {"projection.bias"}),
        ({"normalization": "LayerNorm", "qk_layernorm": True}, {"q_norm.bias", "k_norm.bias"}),
    ],
)
def test_a_layer_has_only_the_requested_biases(keys: dict[str, Any], biases: set[str]) -> None:
    model = model_config(**keys)
    table = RotaryTable.of(model, LENGTH, torch.float32, CPU)
    weights, found = attend(model, LatentAttention if model.multi_latent_attention else SelfAttention, table)
    assert {name for name in weights if name.endswith("bias")} == biases
    assert all(found[name].any() for name in biases)


def test_a_given_scale_replaces_the_computed_one() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
    scaling = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}
    table = RotaryTable.of(model_config(**LATENT), LENGTH, torch.float32, CPU)
    plain, given = (
        attend(model_config(**LATENT, **keys), LatentAttention, table)[1]["output"]
        for keys in ({}, {"softmax_scale": 14**-0.5, "rope_scaling": scaling})
    )
    torch.testing.assert_close(given, plain)
