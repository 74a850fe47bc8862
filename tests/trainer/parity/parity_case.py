"""Case of the parity matrix: layout, model and batch, which determine the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tests.trainer.parity.balanced_models import BALANCED
from tests.trainer.parity.encoder_models import ENCODER_DECODERS, ENCODERS
from tests.trainer.parity.llama_shape import LLAMA
from trainer.config.train_config import TrainConfig
from trainer.data.samples.document_places import Documents
from trainer.data.samples.micro_batch import MicroBatch
from trainer.families.catalogue import FAMILIES, read_model
from trainer.families.format.family import Family
from trainer.planning.build_config import build_config

VOCAB_SIZE = 101
SEQ_LENGTH = 16
ENCODER_LENGTH = 24
MICRO_BATCH_SIZE = 2

SGD = {"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.0, "weight_decay": 0.1, "clip_grad": 1.0}
# With this large epsilon a parameter whose gradient is only rounding, such as a key's bias, hardly changes. Otherwise
# Adam would divide the rounding by its own size.
ADAM = {
    "optimizer": "adam",
    "lr": 1e-2,
    "lr_decay_style": "constant",
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "adam_eps": 1e-4,
}
_MOMENT_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype")
# The optimizer of each iteration, by the name of a case's choice.
OPTIMIZERS: Mapping[str, Sequence[Mapping[str, Any]]] = {"sgd": (SGD, ADAM), "adam": (ADAM, ADAM)}

_GPT2 = {"num_attention_heads": 8, "hidden_dropout": 0.1, "attention_dropout": 0.1}
_EXPERTS = {
    **LLAMA,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    # Learned positions, LayerNorm, biases, a tied table, dropout everywhere.
    "gpt2": _GPT2,
    "llama": LLAMA,
    # Biases of queries, keys and values only, partly rotated heads, a tied table, fewer key and value heads than
    # tensor-parallel ranks; and so much padding that three of four ranks hold only padding of the table.
    "qwen": {
        **LLAMA,
        "num_query_groups": 2,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
        "rotary_percent": 0.5,
        "make_vocab_size_divisible_by": 128,
    },
    # Normalized queries and keys; neighbouring channels rotated together, by scaled angles, in a part of each head;
    # heads wider than their share of the hidden size; fewer key and value heads than tensor-parallel ranks.
    "qwen3": {
        **LLAMA,
        "num_query_groups": 1,
        "kv_channels": 8,
        "qk_layernorm": True,
        "rotary_interleaved": True,
        "rotary_percent": 0.5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
    # A norm of queries and keys over all heads, those of the other tensor-parallel ranks included.
    "olmo2": {
        **LLAMA,
        "num_query_groups": 1,
        "qk_layernorm": True,
        "qk_layernorm_scope": "all",
        "norm_placement": "output",
    },
    # Latent attention: low-rank products, one rotated key for all heads, values of another width. Experts in groups
    # after a first dense layer, a shared expert, sigmoid scores, a bias that only chooses. Two prediction layers.
    "deepseek": {
        **{name: value for name, value in LLAMA.items() if name != "num_query_groups"},
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 7,
        "num_experts": 8,
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "moe_router_topk": 3,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 1.5,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_enable_expert_bias": True,
        "rotary_interleaved": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
        "mtp_num_layers": 2,
        "mtp_loss_scaling_factor": 0.5,
    },
    "mixtral": _EXPERTS,
    # A bounded number of tokens per expert, scores over all experts; one key and value head for all queries. The first
    # tokens are kept: scores near 1 differ only by rounding.
    "capacity": {
        **_EXPERTS,
        "num_query_groups": 1,
        "moe_expert_capacity_factor": 0.75,
        "moe_token_drop_policy": "position",
        "moe_router_pre_softmax": True,
    },
    # Sigmoid scores, a shared expert, dense layers in between, biases.
    "sigmoid": {
        **_EXPERTS,
        "moe_router_score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": 16,
        "moe_layer_freq": 2,
        "disable_bias_linear": False,
    },
    # Gemma 2: norms before and after each sublayer, which multiply by 1 + weight, a scaled word embedding, GeGLU,
    # capped logits, a tied table.
    "gemma2": {
        **LLAMA,
        "swiglu": False,
        "gated_linear_unit": True,
        "activation_func": "gelu_tanh",
        "untie_embeddings_and_output_weights": False,
        "norm_placement": "sandwich",
        "apply_layernorm_1p": True,
        "embedding_scale": 32**0.5,
        "final_logit_softcapping": 2.0,
    },
    # OPT-350M: norms after the residual adds and none at the end, a narrow word table with projections, positions from
    # row 2 on, ReLU, biases, a tied table, dropout.
    "opt": {
        "num_attention_heads": 8,
        "norm_placement": "post",
        "has_final_norm": False,
        "embedding_size": 24,
        "position_embedding_offset": 2,
        "activation_func": "relu",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.0,
    },
    # BLOOM: a LayerNorm of the word embedding, ALiBi.
    "bloom": {**_GPT2, "embedding_layer_norm": True, "position_embedding_type": "alibi"},
    # GPT-NeoX: attention and feed-forward side by side, LayerNorm, partly rotated heads, biases, also of the head.
    "neox": {
        "num_attention_heads": 8,
        "parallel_residual": True,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "untie_embeddings_and_output_weights": True,
        "add_head_bias": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.0,
    },
}


def _of_family(family: Family) -> dict[str, Any]:
    """Keys of a family's tiny model. The length and the vocabulary are the case's."""
    _, model = read_model({"model_type": family.model_type, **family.tiny}, family.name)
    drawn = {"vocab_size", "max_position_embeddings", "init_method_std"}
    return model.model_dump(mode="json", exclude_defaults=True, exclude=drawn)


# The families of decoders; encoders have batches of their own.
FAMILY_MODELS: Mapping[str, Mapping[str, Any]] = {
    family.name: keys for family in FAMILIES if "architecture" not in (keys := _of_family(family))
}

RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "core": {"recompute_granularity": "selective"},
    "modules": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    # In layers with experts: the whole feed-forward part, or only its cheap activations.
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "moe-act": {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]},
    "loss": {"cross_entropy_fusion_impl": "linear", "loss_chunk_size": 12},  # of the 32 tokens of a micro-batch
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
    etp: int | None = None  # ranks that divide an expert; None: tp
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
    order: str = "tp-cp-ep-dp-pp"
    steps: str = "sgd"  # of OPTIMIZERS
    moments: str = "fp32"
    gradients: str = "fp32"
    remainders: bool = False
    """With Adam: dtypes of moments and main gradients, and only remainders of the masters beside the weights."""
    layers: int = 3  # no multiple of the number of stages; 5 or 7 where there are more stages

    def __post_init__(self) -> None:
        stages = self.pp * self.chunks
        if stages > self.layers:
            object.__setattr__(self, "layers", 5 if stages <= 5 else 7)

    device: str = "cpu"
    """``cuda`` puts all ranks on one GPU, where they communicate by gloo."""

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
            layers=self.layers,
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
                    "num_layers": self.layers,
                    "hidden_size": 32,
                    "make_vocab_size_divisible_by": 8,
                    "init_method_std": 0.1,
                    **self._shape(),
                },
                "parallel": {
                    "tensor_model_parallel_size": self.tp,
                    "pipeline_model_parallel_size": self.pp,
                    "context_parallel_size": self.cp,
                    "expert_model_parallel_size": self.ep,
                    "expert_tensor_parallel_size": self.etp,
                    "cp_comm_type": self.cp_comm,
                    "rank_order": self.order,
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
                    "seq_length": ENCODER_LENGTH if self.model in ENCODER_DECODERS else SEQ_LENGTH,
                    "decoder_seq_length": SEQ_LENGTH if self.model in ENCODER_DECODERS else 128,
                    "micro_batch_size": MICRO_BATCH_SIZE,
                    "global_batch_size": MICRO_BATCH_SIZE * self.micro_batches * self.dp,
                    "device": self.device,
                    "initial_loss_scale": 1024.0,
                    "bf16": self.precision == "bf16",
                    "fp16": self.precision == "fp16",
                    **RECOMPUTE[self.recompute],
                },
                "optimizer": {
                    **optimizer,
                    "optimizer_cpu_offload": self.offload,
                    **({"main_grads_dtype": self.gradients} if optimizer["optimizer"] == "adam" else {}),
                    "store_param_remainders": self.remainders and optimizer["optimizer"] == "adam",
                    **(dict.fromkeys(_MOMENT_DTYPES, self.moments) if optimizer["optimizer"] == "adam" else {}),
                },
                "data": {
                    "mock_data": True,
                    "reset_attention_mask": self.documents,
                    "reset_position_ids": self.documents,
                },
            }
        )

    def _shape(self) -> dict[str, Any]:
        """The model's keys, of which a list has one entry per layer."""
        if self.model in FAMILY_MODELS:
            return dict(FAMILY_MODELS[self.model])
        shape = (MODELS | BALANCED | ENCODERS | ENCODER_DECODERS)[self.model]
        return {key: value[: self.layers] if isinstance(value, list) else value for key, value in shape.items()}

    def batch(self, iteration: int) -> list[MicroBatch]:
        """The micro-batches of one global batch, those of all replicas."""
        generator, count = torch.Generator().manual_seed(77 + iteration), self.micro_batches * self.dp
        batch = []
        for index in range(count):
            window = torch.randint(0, VOCAB_SIZE, (MICRO_BATCH_SIZE, SEQ_LENGTH + 1), generator=generator)
            # Each micro-batch keeps another share of its labels, the last but one hardly any.
            share = 0.05 if index == count - 2 else (index + 1) / count
            mask = (torch.rand((MICRO_BATCH_SIZE, SEQ_LENGTH), generator=generator) < share).float()
            bounds = ((0, 3 + index % 5, SEQ_LENGTH), (0, 1, 9, 10, SEQ_LENGTH))
            # The first token of a document attends only to itself. Two equal ones would have equal scores with every
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
                    **(self._encoder_input(generator) if self.model in ENCODERS else {}),
                    **(self._source(generator) if self.model in ENCODER_DECODERS else {}),
                )
            )
        return batch

    def _encoder_input(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Padding of another length in each sample, token types, and labels of the samples."""
        shape = (MICRO_BATCH_SIZE, SEQ_LENGTH)
        lengths = torch.randint(5, SEQ_LENGTH + 1, (shape[0], 1), generator=generator)
        found = {"padding_mask": torch.arange(SEQ_LENGTH) < lengths}
        if "bert_binary_head" not in ENCODERS[self.model]:
            found["token_types"] = torch.randint(0, 2, shape, generator=generator)
            found["sample_labels"] = torch.randint(0, 2, shape[:1], generator=generator)
        return found

    def loss_counts(self, iteration: int) -> list[int]:
        """Number of labels in the global batch that count in each term of the loss."""
        return [
            sum(counts) for counts in zip(*(part.loss_counts.values() for part in self.batch(iteration)), strict=True)
        ]

    def _source(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Tokens of the encoder and their mask; each sample has padding of another length."""
        shape = (MICRO_BATCH_SIZE, ENCODER_LENGTH)
        lengths = torch.randint(1, ENCODER_LENGTH + 1, (MICRO_BATCH_SIZE, 1), generator=generator)
        return {
            "encoder_tokens": torch.randint(0, VOCAB_SIZE, shape, generator=generator),
            "encoder_mask": torch.arange(ENCODER_LENGTH) < lengths,
        }

    def valid_tokens(self, iteration: int) -> int:
        """Number of unmasked labels in the global batch."""
        return self.loss_counts(iteration)[0]

    def but(self, **changes: Any) -> Case:
        """A copy with changes."""
        return replace(self, **changes)
