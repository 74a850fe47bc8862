"""Maximal update parametrization: initial values, scores and logits by width, and steps that no width makes larger."""

import math

import pytest
import torch

from tests.trainer.optimizer.test_optimizer import build
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.random_streams import StepRandomness
from trainer.pipeline.executor import forward_backward, forward_logits

WIDE = {"hidden_size": 256, "num_attention_heads": 4, "init_method_std": 0.1}
LLAMA = {"normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True, "position_embedding_type": "rope"}
EXPERTS = {**LLAMA, "num_experts": 4, "moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True}
UNTIED = {"untie_embeddings_and_output_weights": True}
EMBEDDED = {"embedding_init_method_std": 0.3}


@pytest.mark.parametrize("shape", [{}, {**LLAMA, **UNTIED}, EXPERTS, {**EMBEDDED, **UNTIED}])
def test_initial_values_by_width(shape):
    model, _ = build(model={**WIDE, **shape, "mup_base_hidden_size": 16})
    tables = shape.get("embedding_init_method_std", 0.1)
    seen = set()
    for name, layout in model.layouts.items():
        if not layout.is_matrix:
            continue
        std = 0.1 / 4  # the root of 256 / 16
        if name.startswith("embedding") or name == "head.weight":
            std = tables
        elif name.endswith(("output.weight", "fc2.weight", "projection.weight")):
            std /= math.sqrt(2 * 2)
        values = model.parameters[name].detach()[: layout.valid_rows]
        # Of n numbers the standard deviation is known to about 1 / sqrt(2 n).
        assert float(values.std()) == pytest.approx(std, rel=6 / math.sqrt(2 * values.numel())), name
        seen.add(std)
    assert len(seen) == 3


def moved(width, base, steps=6):
    """Root mean square of what these steps add to the logits, and that of the logits before them."""
    shape = {**LLAMA, **UNTIED, "hidden_size": width, "num_attention_heads": width // 16, "init_method_std": 0.25}
    model, optimizer = build(training={"micro_batch_size": 4}, model={**shape, "mup_base_hidden_size": base})
    tokens = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(1))
    batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def logits():
        with torch.no_grad():
            return forward_logits(model, batch.tokens)

    before = logits()
    for step in range(steps):
        forward_backward(model, [batch], valid_tokens=32, loss_scale=1.0, randomness=StepRandomness(1, step))
        optimizer.step(0.01)
    return float((logits() - before).square().mean().sqrt()), float(before.square().mean().sqrt())


def test_a_wide_model_learns_as_far_as_a_narrow_one_at_the_same_rate():
    """Yang et al. 2022, appendix D.1: their coordinate check."""
    widths = (32, 512)
    narrow, wide = (moved(width, 32)[0] for width in widths)
    assert wide < 1.5 * narrow
    narrow, wide = (moved(width, None)[0] for width in widths)
    assert wide > 3 * narrow
