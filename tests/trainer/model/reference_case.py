"""Small models on one process, to compare with the reference."""

import torch

from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.parallel_model import build_model
from trainer.planning.build_config import build_config

VOCAB_SIZE, LENGTH = 61, 12
# Rounding has no bound of its own: it depends on the model and the processor. The reference in the trainer's dtype
# shows how far rounding takes it from float64, and the trainer must stay within four times that. So much, two bits, may
# come of sums in another order and of fused operations; over the models and processors it was a factor of 1.8.
SLACK = 4
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}


def build(model, **training):
    """Config and model, without dropout."""
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "make_vocab_size_divisible_by": 16}
    plain = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "init_method_std": 0.2}
    config = build_config(
        {
            "model": {**shape, **plain, **model},
            "training": {"train_iters": 1, "seq_length": LENGTH, "micro_batch_size": 3, **training},
            "optimizer": {"lr": 1e-3},
        }
    )
    mesh = ParallelMesh.build(config, 0, 1)
    return config, build_model(config, VOCAB_SIZE, mesh, ProcessGroups(), torch.device("cpu"))


def stirred(model, **training):
    """As ``build``, with random biases and norms: initial zeros and ones would hide mistakes in their use."""
    config, built = build(model, **training)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in built.parameters.items():
            if not built.layouts[name].decay:
                parameter += torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2
    return config, built


def batch(index=0, masked=False):
    """A micro-batch of three samples; ``masked`` leaves about half of the labels."""
    generator = torch.Generator().manual_seed(index)
    window = torch.randint(0, VOCAB_SIZE, (3, LENGTH + 1), generator=generator)
    mask = (torch.rand(3, LENGTH, generator=generator) < 0.5).float() if masked else None
    return MicroBatch(window[:, :-1].contiguous(), window[:, 1:].contiguous(), mask, index)


def reference_weights(built, dtype=torch.float64):
    """Copies of all weights without padding, for the reference."""
    return {
        name: parameter.detach().to(dtype)[: built.layouts[name].valid_rows].requires_grad_()
        for name, parameter in built.parameters.items()
    }


def distance(found, right):
    """In the 2-norm, in which rounding averages out, relative to the right values."""
    return float((found.double() - right).norm() / right.norm())
