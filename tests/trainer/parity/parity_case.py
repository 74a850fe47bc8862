"""Case of the parity matrix: layout, model and batch as one value, from which the config follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from trainer.config.train_config import TrainConfig
from trainer.data.samples.batches import MicroBatch
from trainer.data.samples.document_places import Documents
from trainer.planning.build_config import build_config

VOCAB_SIZE = 101
SEQ_LENGTH = 16
MICRO_BATCH_SIZE = 2

SGD = {"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.0, "weight_decay": 0.1, "clip_grad": 1.0}
# The large epsilon lets a parameter whose gradient is nothing but rounding (a key's bias has none) stay where it is:
# Adam would else divide the rounding by its own size.
ADAM = {
    "optimizer": "adam",
    "lr": 1e-2,
    "lr_decay_style": "constant",
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "adam_eps": 1e-4,
}
# One for each iteration of a case.
OPTIMIZERS: Sequence[Mapping[str, Any]] = (SGD, ADAM, ADAM)

_GPT2 = {"num_attention_heads": 8, "hidden_dropout": 0.1, "attention_dropout": 0.1}
_LLAMA = {
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 48,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_EXPERTS = {
    **_LLAMA,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    # Learned positions, LayerNorm, biases, a tied table, dropout everywhere.
    "gpt2": _GPT2,
    # The same where attention takes no dropout, as ring attention wants it.
    "gpt2-hidden-dropout": {**_GPT2, "attention_dropout": 0.0},
    "llama": _LLAMA,
    # Biases of queries, keys and values alone, partly rotated heads, a tied table, fewer key and value heads than
    # tensor-parallel ranks; and so much padding that three of four ranks hold nothing else of the table.
    "qwen": {
        **_LLAMA,
        "num_query_groups": 2,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
        "rotary_percent": 0.5,
        "make_vocab_size_divisible_by": 128,
    },
    "mixtral": _EXPERTS,
    # A bounded number of tokens per expert, scores over all experts; one key and value head for all queries. The first
    # tokens stay: scores near 1 are alike but for rounding, which would decide who is dropped by them.
    "capacity": {
        **_EXPERTS,
        "num_query_groups": 1,
        "moe_expert_capacity_factor": 0.75,
        "moe_token_drop_policy": "position",
        "moe_router_pre_softmax": True,
    },
    # Sigmoid scores, an expert for all, dense layers between, biases.
    "sigmoid": {
        **_EXPERTS,
        "moe_router_score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": 16,
        "moe_layer_freq": 2,
        "disable_bias_linear": False,
    },
}

RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "core": {"recompute_granularity": "selective"},
    "modules": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    # Of layers with experts: all of the feed-forward part, or what is cheap to compute of it.
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "moe-act": {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]},
}

SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class Case:
    """One cell of the matrix. ``micro_batches`` counts those of one replica."""

    model: str = "llama"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    sp: bool = False
    cp_comm: str = "p2p"
    schedule: str = "1f1b"
    recompute: str = "none"
    zero: int = 0
    offload: bool = False
    overlap: bool = True
    documents: bool = False
    micro_batches: int = 4
    precision: str = "fp32"
    device: str = "cpu"
    """``cuda`` puts all ranks on one GPU, where they talk by gloo."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def serial(self) -> Case:
        """The same model and global batch on one rank, with nothing saved anywhere."""
        return Case(
            model=self.model,
            documents=self.documents,
            micro_batches=self.micro_batches * self.dp,
            precision=self.precision,
            device=self.device,
        )

    @property
    def chunks(self) -> int:
        """Virtual stages per rank."""
        return 2 if self.schedule in ("interleaved", "zb-v") else 1

    def __str__(self) -> str:
        default = Case()
        parts = [self.model]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "model" and value != getattr(default, field.name):
                parts.append(field.name if value is True else f"{field.name}={value}".replace("=True", ""))
        return " ".join(parts)

    def config(self, optimizer: Mapping[str, Any] = SGD) -> TrainConfig:
        """The training config of this case.

        Raises:
            ConfigError: the config refuses the combination.
        """
        return build_config(
            {
                # Weights large enough that the loss is not just that of a uniform guess.
                "model": {
                    # More than the stages, and no multiple of their number.
                    "num_layers": 7,
                    "hidden_size": 32,
                    "make_vocab_size_divisible_by": 8,
                    "init_method_std": 0.1,
                    **MODELS[self.model],
                },
                "parallel": {
                    "tensor_model_parallel_size": self.tp,
                    "pipeline_model_parallel_size": self.pp,
                    "context_parallel_size": self.cp,
                    "expert_model_parallel_size": self.ep,
                    "cp_comm_type": self.cp_comm,
                    "sequence_parallel": self.sp,
                    "pipeline_schedule": self.schedule,
                    "num_virtual_stages_per_pipeline_rank": 2 if self.schedule == "interleaved" else None,
                    "data_parallel_sharding_strategy": SHARDING[self.zero],
                    "overlap_grad_reduce": self.overlap,
                    "overlap_param_gather": self.overlap,
                    # Several buckets even in a model this small.
                    "ddp_bucket_size": 5000,
                },
                "training": {
                    "train_iters": 10,
                    "seq_length": SEQ_LENGTH,
                    "micro_batch_size": MICRO_BATCH_SIZE,
                    "global_batch_size": MICRO_BATCH_SIZE * self.micro_batches * self.dp,
                    "device": self.device,
                    "initial_loss_scale": 1024.0,
                    "bf16": self.precision == "bf16",
                    "fp16": self.precision == "fp16",
                    **RECOMPUTE[self.recompute],
                },
                "optimizer": {**optimizer, "optimizer_cpu_offload": self.offload},
                "data": {
                    "mock_data": True,
                    "reset_attention_mask": self.documents,
                    "reset_position_ids": self.documents,
                },
            }
        )

    def batch(self, iteration: int) -> list[MicroBatch]:
        """The micro-batches of one global batch, those of all replicas."""
        generator = torch.Generator().manual_seed(77 + iteration)
        count = self.micro_batches * self.dp
        batch = []
        for index in range(count):
            window = torch.randint(0, VOCAB_SIZE, (MICRO_BATCH_SIZE, SEQ_LENGTH + 1), generator=generator)
            # Each micro-batch keeps another share of its labels, the last but one next to none.
            share = 0.05 if index == count - 2 else (index + 1) / count
            mask = (torch.rand((MICRO_BATCH_SIZE, SEQ_LENGTH), generator=generator) < share).float()
            bounds = ((0, 3 + index % 5, SEQ_LENGTH), (0, 1, 9, 10, SEQ_LENGTH))
            # The first token of a document sees nothing but itself. Two that are alike would score alike with every
            # expert, and rounding would decide which of them a full expert drops.
            starts = [(row, start) for row, ends in enumerate(bounds) for start in ends[:-1]]
            for (row, start), token in zip(starts, torch.randperm(VOCAB_SIZE, generator=generator), strict=False):
                window[row, start] = token
            documents = Documents(bounds) if self.documents else None
            batch.append(
                MicroBatch(
                    window[:, :-1].contiguous(),
                    window[:, 1:].contiguous(),
                    mask,
                    index,
                    documents=documents,
                    restarts=documents,
                )
            )
        return batch

    def valid_tokens(self, iteration: int) -> int:
        """Number of unmasked labels in the global batch."""
        return int(sum(part.loss_mask.sum() for part in self.batch(iteration) if part.loss_mask is not None))

    def but(self, **changes: Any) -> Case:
        """A copy with changes."""
        return replace(self, **changes)
