"""Small models in layouts over 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config
from trainer.planning.estimate.devices import Device
from trainer.planning.estimate.plan import RunPlan, plan_run

VOCABULARY = 8192
STEPS = 5
"""Steps of a run, of which the first does not count."""
LENGTH = 256
"""Tokens of a sequence."""
_SIZE = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": LENGTH,
    "vocab_size": VOCABULARY,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_LLAMA = {
    **_SIZE,
    "ffn_hidden_size": 1408,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
_EXPERTS = {
    **_LLAMA,
    "num_layers": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
}
_UNFUSED = {**_SIZE, "attention_backend": "unfused", "attention_dropout": 0.1, "hidden_dropout": 0.1}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "GPT": _SIZE,
    "GPT, unfused": _UNFUSED,
    "Llama": _LLAMA,
    "MoE": _EXPERTS,
    "nearly none": {**_SIZE, "num_layers": 1, "hidden_size": 64, "vocab_size": 128},
}
_TP, _SP, _PP = "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size"
_CP, _EP, _ZERO = "context_parallel_size", "expert_model_parallel_size", "data_parallel_sharding_strategy"
_INTERLEAVED = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}


@dataclass(frozen=True)
class Layout:
    """A model on a number of ranks; its global batch are 8 sequences.

    Attributes:
        name: in words.
        model: of MODELS.
        ranks: number of ranks, on one machine.
        parallel: keys of the layout.
        training: keys of the micro-batch and recompute.
    """

    name: str
    model: str
    ranks: int
    parallel: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """The training config, as a file has it."""
        batch = 4 if self.training.get("micro_batch_size", 1) == 1 else 8
        return {
            "model": dict(MODELS[self.model]),
            "parallel": dict(self.parallel),
            "training": {
                "train_iters": STEPS + 100,
                "seq_length": LENGTH,
                "micro_batch_size": 1,
                "global_batch_size": batch,
                "eval_iters": 0,
                "device": "cpu",
                **self.training,
            },
            "optimizer": {"lr": 1e-4, "lr_decay_style": "constant"},
            "data": {"mock_data": True},
            "logging": {"log_interval": 1},
        }

    @property
    def config(self) -> TrainConfig:
        """The training config."""
        return build_config(self.values)

    def plan(self, device: Device) -> RunPlan:
        """The prediction on one machine with ``ranks`` times ``device``."""
        return plan_run(self.config, int(MODELS[self.model]["vocab_size"]), device, 1, self.ranks)

    def pipeline_rank(self, rank: int) -> int:
        """Pipeline rank of a rank: the pipeline is the outermost axis."""
        return rank // (self.ranks // int(self.parallel.get(_PP, 1)))


_WIDE = {"micro_batch_size": 8}
LAYOUTS = (
    Layout("one rank", "GPT", 1),
    Layout("one rank", "Llama", 1),
    Layout("one rank", "MoE", 1),
    Layout("micro-batch 8", "Llama", 1, {}, _WIDE),
    Layout("micro-batch 8, full recompute", "Llama", 1, {}, {**_WIDE, **_FULL}),
    Layout("micro-batch 8", "GPT, unfused", 1, {}, _WIDE),
    Layout(
        "micro-batch 8, selective recompute", "GPT, unfused", 1, {}, {**_WIDE, "recompute_granularity": "selective"}
    ),
    Layout("dp 2", "Llama", 2),
    Layout("dp 2, ZeRO-1", "Llama", 2, {_ZERO: "optim"}),
    Layout("dp 2, ZeRO-2", "Llama", 2, {_ZERO: "optim_grads"}),
    Layout("dp 2, ZeRO-3", "Llama", 2, {_ZERO: "optim_grads_params"}),
    Layout("tp 2", "GPT", 2, {_TP: 2}, {"micro_batch_size": 4}),
    Layout("tp 2, sequence", "GPT", 2, {_TP: 2, _SP: True}, {"micro_batch_size": 4}),
    Layout("pp 2, 1F1B", "Llama", 2, {_PP: 2}),
    Layout("pp 2, interleaved", "Llama", 2, {_PP: 2, **_INTERLEAVED}),
    Layout("cp 2", "Llama", 2, {_CP: 2}, {"micro_batch_size": 4}),
    Layout("ep 2", "MoE", 2, {_EP: 2}),
    Layout("dp 2, tp 2, sequence, ZeRO-1", "Llama", 4, {_TP: 2, _SP: True, _ZERO: "optim"}),
    Layout("pp 2, tp 2", "Llama", 4, {_PP: 2, _TP: 2}),
    Layout("pp 4, 1F1B", "Llama", 4, {_PP: 4}),
    Layout("dp 2, cp 2, ZeRO-3", "Llama", 4, {_CP: 2, _ZERO: "optim_grads_params"}),
    Layout("pp 2, ep 2", "MoE", 4, {_PP: 2, _EP: 2}),
)
PROCESSES = tuple(Layout("a process", "nearly none", ranks, {}, {"seq_length": 32}) for ranks in (1, 2, 4))
"""Runs whose memory is that of the process."""
