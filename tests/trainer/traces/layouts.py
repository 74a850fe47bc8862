"""Layouts whose steps are traced. Sizes are small: operations, waits and messages do not depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 1024
MICRO_BATCHES = 4
LLAMA = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 8,
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
STATES_16_BIT = {
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
    "main_grads_dtype": "bf16",
    "store_param_remainders": True,
}
CHUNKED_LOSS = {"cross_entropy_fusion_impl": "linear"}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128}


@dataclass(frozen=True)
class Layout:
    """A model on some ranks.

    Attributes:
        model: changes of LLAMA.
        parallel: values of the config.
        world_size: number of ranks.
        ranks: those that are traced.
        config: further sections.
        batch: plain, documents or bert.
    """

    model: dict[str, Any]
    parallel: dict[str, Any]
    world_size: int = 1
    ranks: tuple[int, ...] = (0,)
    config: dict[str, dict[str, Any]] | None = None
    batch: str = "plain"

    def values(self, layers: int | None = None) -> dict[str, Any]:
        """Values of the config, with another number of layers."""
        model = {**LLAMA, **self.model}
        replicas = self.world_size // _product(self.parallel)
        return {
            "model": model if layers is None else {**model, "num_layers": layers},
            "parallel": self.parallel,
            "training": {
                "train_iters": 10,
                "seq_length": 256,
                "bf16": True,
                "device": "cuda",
                "micro_batch_size": 1,
                "global_batch_size": MICRO_BATCHES * replicas,
                **(self.config or {}).get("training", {}),
            },
            "optimizer": {"lr": 1e-4, **(self.config or {}).get("optimizer", {})},
            "data": {"mock_data": True},
        }


def _product(parallel: dict[str, Any]) -> int:
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    found = 1
    for name in sizes:
        found *= parallel.get(name, 1)
    return found


_TP, _PP, _CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
LAYOUTS = {
    "llama": Layout({}, {}),
    "llama-grouped-queries": Layout({"num_query_groups": 2}, {}),
    "gpt2-dropout": Layout(
        {
            "normalization": "LayerNorm",
            "swiglu": False,
            "position_embedding_type": "learned_absolute",
            "attention_dropout": 0.1,
            "hidden_dropout": 0.1,
            "disable_bias_linear": False,
            "untie_embeddings_and_output_weights": False,
            "max_position_embeddings": 256,
        },
        {},
    ),
    "recompute": Layout(
        {},
        {},
        config={
            "training": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        },
    ),
    "chunked-loss": Layout({}, {}, config={"training": {**CHUNKED_LOSS, "loss_chunk_size": 64}}),
    "tp8-sp": Layout({}, {_TP: 8, "sequence_parallel": True}, 8, (0, 7)),
    "pp4": Layout({}, {_PP: 4}, 4, (0, 1, 2, 3)),
    "zero1": Layout({}, {"use_distributed_optimizer": True}, 4, (0, 3)),
    "zero1-16-bit": Layout({}, {"use_distributed_optimizer": True}, 4, (0, 3), config={"optimizer": STATES_16_BIT}),
    "zero2": Layout({}, {"data_parallel_sharding_strategy": "optim_grads"}, 4, (0, 3)),
    "zero3": Layout({}, {"data_parallel_sharding_strategy": "optim_grads_params"}, 4, (0, 3)),
    "cp2-ring": Layout({}, {_CP: 2}, 2, (0, 1)),
    "cp2-a2a": Layout({}, {_CP: 2, "cp_comm_type": "a2a"}, 2, (0, 1)),
    "moe": Layout(EXPERTS, {}),
    "moe-ep4": Layout(EXPERTS, {"expert_model_parallel_size": 4}, 4, (0, 3)),
    "moe-tp2-whole-ep4": Layout(
        EXPERTS,
        {_TP: 2, "sequence_parallel": True, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
        4,
        (0, 3),
    ),
    "mtp": Layout({"mtp_num_layers": 1}, {}),
    "documents": Layout({}, {}, batch="documents"),
    "bert": Layout(
        {
            "architecture": "bert",
            "normalization": "LayerNorm",
            "swiglu": False,
            "position_embedding_type": "learned_absolute",
            "disable_bias_linear": False,
            "untie_embeddings_and_output_weights": False,
            "max_position_embeddings": 256,
        },
        {},
        batch="bert",
    ),
    "pp2-interleaved": Layout({}, {_PP: 2, "num_virtual_stages_per_pipeline_rank": 2}, 2, (0, 1)),
    "pp2-zb": Layout({}, {_PP: 2, "pipeline_schedule": "zb-h1"}, 2, (0, 1)),
}
LLAMA_8B = {
    "model": {
        **LLAMA,
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "vocab_size": 128256,
    },
    "training": {
        "train_iters": 10,
        "seq_length": 8192,
        "bf16": True,
        "device": "cuda",
        "micro_batch_size": 1,
        "global_batch_size": MICRO_BATCHES,
    },
    "optimizer": {"lr": 1e-4},
    "data": {"mock_data": True},
}
"""Llama 3.1 8B."""
