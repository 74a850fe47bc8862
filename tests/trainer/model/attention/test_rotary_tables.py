"""Rotary tables of each rope_type against those of transformers; local tables of layers with a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.model.attention.attention_layer import CPU, LATENT, LENGTH, attend, draw, model_config
from trainer.config.sections.model import ModelConfig
from trainer.model.attention.latent_attention import LatentAttention
from trainer.model.attention.self_attention import SelfAttention
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.rotary import RotaryTable, frequencies
from trainer.model.sharding import ParameterBuilder
from trainer.planning.rope import RopeScaling

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 128}
SCALINGS = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3 other bounds": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 9.0, "factor": 3.0},
    "yarn": YARN,
    "yarn other bounds": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn whole numbers are not rounded": {**YARN, "truncate": False},
    "yarn given factor": {**YARN, "attention_factor": 1.3},
    "yarn DeepSeek-V3": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn DeepSeek-V2": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn one mscale": {**YARN, "mscale": 0.707},
    "yarn of a short context": {**YARN, "original_max_position_embeddings": 8},
}


@pytest.mark.parametrize("width", [12, 64])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_tables_equal_transformers(scaling: dict[str, object] | None, width: int) -> None:
    pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama as llama

    shape = {"hidden_size": 8 * width, "num_attention_heads": 8, "max_position_embeddings": 512}
    hub = llama.LlamaConfig(**shape, rope_parameters={"rope_theta": 500.0, "rope_type": "default", **(scaling or {})})
    module = llama.LlamaRotaryEmbedding(hub)
    model = model_config(**shape, rope_scaling=scaling, rotary_base=500.0)
    ours = frequencies(width, 500.0, RopeScaling.of(model))
    assert ours.dtype is torch.float64
    torch.testing.assert_close(ours.float(), module.inv_freq, rtol=2e-6, atol=0)
    cos, sin = module(torch.zeros(1), torch.arange(512)[None])
    table = RotaryTable.of(model, 512, torch.float32, CPU)
    assert table is not None
    for found, expected in ((table.cos, cos), (table.sin, sin)):
        # The other side's angles are float32: 500 radians are off by 3e-5.
        torch.testing.assert_close(found.view(512, width // 2), expected[0, :, : width // 2], rtol=0, atol=1e-4)


def test_the_older_name_of_the_type() -> None:
    model = model_config(rope_scaling={"type": "linear", "factor": 2.0})
    assert torch.equal(frequencies(8, 1e4, RopeScaling.of(model)), frequencies(8, 1e4) / 2)


def test_the_factor_is_the_given_one() -> None:
    """Trainers have ignored it, or taken 8 for every llama3."""
    lowest = [
        float(frequencies(64, 1e4, RopeScaling.of(model_config(rope_scaling={**LLAMA3, "factor": factor})))[-1])
        for factor in (8.0, 32.0)
    ]
    assert lowest[0] == pytest.approx(4 * lowest[1], rel=1e-12)


def test_partial_rotation_takes_the_rotated_width() -> None:
    table = RotaryTable.of(model_config(kv_channels=16, rotary_percent=0.5), LENGTH, torch.float64, CPU)
    assert table is not None
    assert table.cos.shape == (LENGTH, 1, 1, 1, 4)
    torch.testing.assert_close(table.cos[3, 0, 0, 0], torch.cos(3 * 1e4 ** -(torch.arange(4.0).double() / 4)))


def outputs(model: ModelConfig, layer: int, forward_pass: ForwardPass) -> torch.Tensor:
    from trainer.distributed.mesh import ParallelMesh

    builder = ParameterBuilder(1, ParallelMesh(1, 1, 1, 0), False, torch.float32, CPU)
    attention = SelfAttention(model, layer, builder, ParallelAxes())
    result: torch.Tensor = attention(draw("hidden", LENGTH, 1, model.hidden_size), forward_pass)
    return result.detach()


def test_layers_with_a_window_take_the_local_table() -> None:
    keys = {"num_layers": 2, "window_size": LENGTH, "window_layers": [True, False], "rotary_base": 1e6}
    model = model_config(**keys, rotary_base_local=1e3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    tables = [RotaryTable.of(model, LENGTH, torch.float32, CPU, local=local) for local in (False, True)]
    expected = RotaryTable.build(LENGTH, model.head_dim, 1e3, torch.float32, CPU)
    assert tables[1] is not None
    assert torch.equal(tables[1].sin, expected.sin), "the local base, without scaling"
    both = ForwardPass(tables[0], rotary_local=tables[1])
    for layer, own in ((0, tables[1]), (1, tables[0])):
        assert torch.equal(outputs(model, layer, both), outputs(model, layer, ForwardPass(own)))
        assert not torch.equal(outputs(model, layer, both), outputs(model, layer, ForwardPass(tables[layer])))


def test_without_a_local_base_all_layers_take_one_table() -> None:
    assert RotaryTable.of(model_config(window_size=4), LENGTH, torch.float32, CPU, local=True) is None


def permute_rotated_channels(layer: torch.nn.Module, order: torch.Tensor) -> None:
    """Permute the channels of queries and keys that are rotated, the last 8 of each."""
    with torch.no_grad():
        if isinstance(layer, LatentAttention):
            for rows in (layer.query.weight.view(8, 14, 32)[:, -8:], layer.key_value_down.weight[-8:]):
                rows.copy_(rows[..., order, :].clone())
        else:
            heads = layer.get_submodule("qkv").weight.view(8, 3, 8, 32)
            heads[:, :2] = heads[:, :2, order].clone()


@pytest.mark.parametrize(
    ("kind", "keys"), [(SelfAttention, {"kv_channels": 8}), (LatentAttention, LATENT)], ids=["plain", "latent"]
)
def test_interleaved_pairs_are_neighbours(kind: type[torch.nn.Module], keys: dict[str, Any]) -> None:
    """A head whose channels are permuted from (i, i + half) to (2i, 2i + 1) attends alike."""
    halves, pairs = model_config(**keys), model_config(**keys, rotary_interleaved=True)
    table = RotaryTable.of(halves, LENGTH, torch.float32, CPU)
    order = torch.arange(8).view(2, 4).t().flatten()  # 0 4 1 5 2 6 3 7

    def build(model: ModelConfig, *rest: object) -> torch.nn.Module:
        layer = kind(model, *rest)
        if model.rotary_interleaved:
            permute_rotated_channels(layer, order)
        return layer

    (_, expected), (_, found) = (attend(model, build, table) for model in (halves, pairs))
    torch.testing.assert_close(found["output"], expected["output"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["input"], expected["input"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [{}, {"attention_factor": 1.4}])
def test_longrope_takes_the_factors_of_the_rows_length(given: dict[str, float]) -> None:
    pytest.importorskip("transformers")
    from transformers.models.phi3 import modeling_phi3 as phi3

    short, long = [1.0 + 0.1 * pair for pair in range(6)], [2.0 + pair for pair in range(6)]
    shape = {"hidden_size": 96, "num_attention_heads": 8, "max_position_embeddings": 512}
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, **given}
    hub = phi3.Phi3Config(**shape, original_max_position_embeddings=64, rope_scaling=dict(scaling), pad_token_id=0)
    module = phi3.Phi3RotaryEmbedding(hub)
    scaling |= {"original_max_position_embeddings": 64, "factor": 8.0}
    table = RotaryTable.of(model_config(**shape, rope_scaling=scaling), 512, torch.float32, CPU)
    assert table is not None
    for length in (1, 64, 65, 512, 20):
        cos, sin = module(torch.zeros(1), torch.arange(length)[None])
        found = table.of_rows(length).first(length)
        for ours, theirs in ((found.cos, cos), (found.sin, sin)):
            torch.testing.assert_close(ours.view(length, 6), theirs[0, :, :6], rtol=0, atol=1e-4)
