"""Mixtral: logits, loss and gradients equal those of transformers (Hugging Face), recorded by tests.record_mixtral."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.distributed.random_streams import StepRandomness
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward, forward_logits
from trainer.planning.build_config import build_config

RECORDED = Path(__file__).parents[2] / "recorded" / "mixtral.npz"
LAYERS, HEADS, GROUPS, WIDTH, VOCAB_SIZE = 2, 4, 2, 4, 32


@pytest.fixture(scope="module")
def recorded():
    with np.load(RECORDED) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def build(**moe):
    config = build_config(
        {
            "model": {
                "num_layers": LAYERS,
                "hidden_size": HEADS * WIDTH,
                "num_attention_heads": HEADS,
                "num_query_groups": GROUPS,
                "ffn_hidden_size": 12,
                "num_experts": 4,
                "position_embedding_type": "rope",
                "rotary_base": 1e6,
                "normalization": "RMSNorm",
                "swiglu": True,
                "disable_bias_linear": True,
                "untie_embeddings_and_output_weights": True,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "make_vocab_size_divisible_by": VOCAB_SIZE,
                **moe,
            },
            "training": {"train_iters": 1, "seq_length": 12, "micro_batch_size": 3},
            "optimizer": {"lr": 1e-3},
        }
    )
    mesh = ParallelMesh.build(config, 0, 1)
    return build_model(config, VOCAB_SIZE, mesh, ProcessGroups(), torch.device("cpu"))


def under_our_names(recorded, what):
    """Recorded weights or gradients under the trainer's names and in its shapes."""
    found = {name.removeprefix(f"{what}/"): tensor for name, tensor in recorded.items() if name.startswith(what)}
    ours = {
        "embedding.word.weight": found["model.embed_tokens.weight"],
        "final_norm.weight": found["model.norm.weight"],
        "head.weight": found["lm_head.weight"],
    }
    for layer in range(LAYERS):
        theirs, mine = f"model.layers.{layer}.", f"layers.{layer}."
        rows = []
        for group in range(GROUPS):
            for kind, heads in (("q", HEADS // GROUPS), ("k", 1), ("v", 1)):
                rows.append(found[f"{theirs}self_attn.{kind}_proj.weight"].split(heads * WIDTH)[group])
        experts = found[f"{theirs}mlp.experts.gate_up_proj"]
        ours |= {
            f"{mine}attention_norm.weight": found[f"{theirs}input_layernorm.weight"],
            f"{mine}attention.qkv.weight": torch.cat(rows),
            f"{mine}attention.projection.weight": found[f"{theirs}self_attn.o_proj.weight"],
            f"{mine}mlp_norm.weight": found[f"{theirs}post_attention_layernorm.weight"],
            f"{mine}moe.router.weight": found[f"{theirs}mlp.gate.weight"],
            f"{mine}moe.experts.fc1.weight": experts.unflatten(1, (2, -1)),
            f"{mine}moe.experts.fc2.weight": found[f"{theirs}mlp.experts.down_proj"],
        }
    assert len(found) == 3 + LAYERS * 9
    return ours


def load(model, recorded):
    weights = under_our_names(recorded, "weight")
    assert weights.keys() == model.parameters.keys()
    with torch.no_grad():
        for name, parameter in model.parameters.items():
            parameter.copy_(weights[name])


def test_loss_and_gradients_equal_those_of_transformers(recorded):
    model = build()
    load(model, recorded)
    parts = [MicroBatch(recorded["tokens"].contiguous(), recorded["labels"].contiguous())]
    count = recorded["labels"].numel()
    loss = forward_backward(model, parts, valid_tokens=count, loss_scale=1.0, randomness=StepRandomness(1, 0))
    assert float(loss) / count == pytest.approx(float(recorded["loss"]), abs=1e-6)
    for name, expected in under_our_names(recorded, "gradient").items():
        error = (model.gradients.main_grad(name) - expected).abs().max()
        assert float(error) <= 1e-5 * float(expected.abs().max()), name


def test_logits_equal_those_of_transformers(recorded):
    model = build()
    load(model, recorded)
    torch.testing.assert_close(forward_logits(model, recorded["tokens"]), recorded["logits"], atol=1e-5, rtol=0)


def test_softmax_before_the_choice_is_another_model(recorded):
    model = build(moe_router_pre_softmax=True)
    load(model, recorded)
    assert (forward_logits(model, recorded["tokens"]) - recorded["logits"]).abs().max() > 0.1
