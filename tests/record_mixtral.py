"""Record tests/recorded/mixtral.npz: a small Mixtral of Hugging Face's transformers, its logits, loss and gradients.

Run from the checkout with a Python that has transformers (5.23.0 when this was recorded), which the tests do not need:

    ~/.cache/llmctl-benchmarks/trainers/bin/python -m tests.record_mixtral
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import MixtralConfig, MixtralForCausalLM

RECORDED = Path(__file__).parent / "recorded" / "mixtral.npz"


def record() -> dict[str, np.ndarray]:
    """Weights under ``weight/``, gradients of the mean loss under ``gradient/``, by the names of transformers."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=12,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        sliding_window=None,
        router_jitter_noise=0.0,
        output_router_logits=False,
        initializer_range=0.3,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    window = torch.randint(0, config.vocab_size, (3, 13))
    tokens, labels = window[:, :-1], window[:, 1:]
    logits = model(input_ids=tokens).logits
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    recorded = {"tokens": tokens.numpy(), "labels": labels.numpy(), "logits": logits.detach().numpy()}
    recorded["loss"] = loss.detach().numpy()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        recorded[f"weight/{name}"] = parameter.detach().numpy()
        recorded[f"gradient/{name}"] = parameter.grad.numpy()
    return recorded


if __name__ == "__main__":
    np.savez_compressed(RECORDED, **record())
