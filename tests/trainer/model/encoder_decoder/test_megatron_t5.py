"""Megatron-LM's T5 against plain torch: logits, loss, gradients and number of parameters. About 5 s on one core."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.model.encoder_decoder.megatron_t5 import MegatronT5
from tests.trainer.model.reference_case import VOCAB_SIZE, build, distance, reference_weights, stirred
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.random_streams import StepRandomness
from trainer.pipeline.executor import forward_backward
from trainer.planning.flops import count_parameters

HEADS, LAYERS, ENCODER, DECODER = 4, (2, 3), 40, 24
# What import-script sets for pretrain_t5.py without further flags.
DEFAULTS = {
    "architecture": "t5",
    "decoder_num_layers": LAYERS[1],
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "disable_bias_linear": False,
    "add_head_bias": True,
    "scale_decoder_output": False,
    "stack_output_dropout": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "relative": {"position_embedding_type": "relative"},
    "rope": {"position_embedding_type": "rope"},
    "rms": {"normalization": "RMSNorm", "disable_bias_linear": True},
    "untied": {"untie_embeddings_and_output_weights": True, "add_head_bias": False},
}
# Rounding of float32 in another order through five layers, in the 2-norm relative to float64; a missing bias or another
# position is above 1e-2.
BOUND = 2e-6


def sample() -> MicroBatch:
    """Three samples with encoder padding of another length in each; half of the labels count."""
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(0, VOCAB_SIZE, (3, ENCODER), generator=generator)
    window = torch.randint(0, VOCAB_SIZE, (3, DECODER + 1), generator=generator)
    mask = (torch.rand(3, DECODER, generator=generator) < 0.5).float()
    padding = torch.arange(ENCODER) < torch.tensor([[ENCODER], [17], [5]])
    tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    return MicroBatch(tokens, labels, mask, 0, encoder_tokens=source, encoder_mask=padding)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_loss_and_gradients_equal_plain_torch(changes: dict[str, Any]) -> None:
    shape = {"num_layers": LAYERS[0], "num_attention_heads": HEADS}
    config, built = stirred({**shape, **DEFAULTS, **changes}, seq_length=ENCODER, decoder_seq_length=DECODER)
    model, batch = config.model, sample()
    weights = reference_weights(built)
    theirs = MegatronT5(
        weights,
        heads=HEADS,
        layers=LAYERS,
        positions=model.position_embedding_type,
        rms_norm=model.normalization == "RMSNorm",
    ).logits(batch.encoder_tokens, batch.encoder_mask, batch.tokens)
    with torch.no_grad():
        ours = built.chunks[0](None, batch, None, compute_loss=False).transpose(0, 1)
    assert distance(ours, theirs.detach()) < BOUND
    losses = torch.logsumexp(theirs, -1) - theirs.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
    right = (losses * batch.loss_mask).sum() / 10
    right.backward()
    loss = forward_backward(built, [batch], valid_tokens=10, loss_scale=1.0, randomness=StepRandomness(1, 0))
    assert float(loss) == pytest.approx(10 * right.item(), rel=BOUND)
    for name, weight in weights.items():
        ours, expected = built.gradients.main_grad(name)[: len(weight)], weight.grad
        if name.endswith("key_value.bias"):
            # The softmax takes a key's bias out again, so that the key's gradient is rounding; the value's is not.
            ours, expected = ours[1], expected[1]
        assert distance(ours, expected) < 10 * BOUND, name


def test_parameters_are_those_of_megatrons_formula() -> None:
    """Of the 220m model of Megatron-LM's recipe: 12 + 12 layers, hidden 768, 512 positions, biases everywhere."""
    hidden, ffn, positions, vocab = 768, 3072, 512, 30592

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    norm = 2 * hidden
    attention = linear(hidden, 3 * hidden) + linear(hidden, hidden)
    cross = linear(hidden, hidden) + linear(hidden, 2 * hidden) + linear(hidden, hidden)
    mlp = linear(hidden, ffn) + linear(ffn, hidden)
    encoder = 12 * (attention + mlp + 2 * norm) + norm
    decoder = 12 * (attention + cross + mlp + 3 * norm) + norm
    expected = vocab * hidden + positions * hidden + encoder + decoder + vocab
    config, _ = build({**DEFAULTS, "num_layers": 1}, seq_length=positions)
    shape = {"num_layers": 12, "decoder_num_layers": None, "hidden_size": hidden, "num_attention_heads": 12}
    model = config.model.model_copy(update={**shape, "max_position_embeddings": positions})
    assert count_parameters(config.model_copy(update={"model": model}), vocab).total == expected


@pytest.mark.parametrize("is_dropped", [True, False])
def test_dropout_of_the_stacks_outputs(is_dropped: bool) -> None:
    changes = {"stack_output_dropout": is_dropped, "hidden_dropout": 0.5}
    _, built = build({**DEFAULTS, "num_layers": 1, **changes}, seq_length=ENCODER, decoder_seq_length=DECODER)
    outputs: list[torch.Tensor] = []
    for stack in (built.chunks[0].encoder, built.chunks[0].decoder):
        stack.register_forward_hook(lambda _, __, output: outputs.append(output))
    built.chunks[0](None, sample(), StepRandomness(1, 0).micro_batch(0))
    shares = [float((output == 0).double().mean()) for output in outputs]
    # About 3,000 elements each: half of them, within five standard deviations.
    assert shares == pytest.approx([0.5, 0.5] if is_dropped else [0.0, 0.0], abs=0.05)
