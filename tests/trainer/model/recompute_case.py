"""Small models and their recompute settings."""

import torch

from trainer.data.samples.micro_batch import MicroBatch
from trainer.planning.build_config import build_config

VOCAB_SIZE = 61
GPT2 = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
LLAMA = {
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
MOE = {
    **LLAMA,
    "num_experts": 4,
    "moe_layer_freq": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_expert_capacity_factor": 0.7,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
}
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FORMS = {
    "core_attn": SELECTIVE,
    "mlp": {**SELECTIVE, "recompute_modules": ["mlp"]},
    "mlp_act": {**SELECTIVE, "recompute_modules": ["mlp_act"]},
    "layernorm": {**SELECTIVE, "recompute_modules": ["layernorm"]},
    "all-parts": {**SELECTIVE, "recompute_modules": ["core_attn", "mlp", "layernorm"]},
    "full": FULL,
    "uniform-3": {**FULL, "recompute_num_layers": 3},
    "block-2": {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
}


EXPERT_FORMS = {
    "moe": {**SELECTIVE, "recompute_modules": ["moe"]},
    "moe_act": {**SELECTIVE, "recompute_modules": ["moe_act"]},
    "moe-parts": {**SELECTIVE, "recompute_modules": ["core_attn", "mlp", "layernorm", "moe_act"]},
    "moe-full": FULL,
}


def make_config(model, training, **shape):
    return build_config(
        {
            "model": {
                "num_layers": 4,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "make_vocab_size_divisible_by": 8,
                "init_method_std": 0.2,
                **model,
            },
            "training": {"train_iters": 1, "seq_length": 16, "micro_batch_size": 2, **shape, **training},
            "optimizer": {"lr": 1e-3},
        }
    )


def batch(index, samples=2, length=16):
    window = torch.randint(0, VOCAB_SIZE, (samples, length + 1), generator=torch.Generator().manual_seed(index))
    return MicroBatch(window[:, :-1].contiguous(), window[:, 1:].contiguous(), None, index)
