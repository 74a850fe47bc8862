"""Parameter counts and FLOPs per token of a model. Torch-free.

tflops_per_device and mfu in metrics.jsonl use this convention: one token of training costs

    6 N + 12 l h s      floating-point operations, with

- N: all parameters that a token passes through, without the input embedding (word and position tables), which is a
  look-up and not a matrix product. Of the experts of a layer only those selected for the token count. The output layer
  is a matrix product, so its table counts once, even if tied to the input embedding. 2 operations per parameter in
  forward and 4 in backward (Kaplan et al. 2020, section 2.1).
- 12 l h s: attention scores and weighted values over l layers, width h = heads x head width and s tokens, without a
  discount for the causal mask (Chowdhery et al. 2022, PaLM, appendix B).

These are model FLOPs, not hardware FLOPs: recomputation does not count. The vocabulary counts without padding, so that
the number is the same for every parallel layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.sections import ModelConfig
    from trainer.config.train_config import TrainConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Parameter counts of the whole model, without vocabulary padding.

    Attributes:
        input_embedding: word table and learned position table.
        layers: all transformer layers, with all their experts.
        active_layers: all transformer layers, with only the experts selected for one token.
        final_norm: the norm before the output layer.
        output_layer: the output table; 0 if tied to the input embedding.
    """

    input_embedding: int
    layers: int
    active_layers: int
    final_norm: int
    output_layer: int

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.input_embedding + self.layers + self.final_norm + self.output_layer

    @property
    def active(self) -> int:
        """Number of parameters used by one token; in a dense model all parameters."""
        return self.total - self.layers + self.active_layers


def count_parameters(config: TrainConfig, vocab_size: int) -> ParameterCounts:
    """Count the parameters of the config's model with a vocabulary of ``vocab_size`` tokens."""
    model = config.model
    word_table = vocab_size * model.hidden_size
    positions = config.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    return ParameterCounts(
        input_embedding=word_table + positions * model.hidden_size,
        layers=_all_layers(model, model.num_experts or 0),
        active_layers=_all_layers(model, model.moe_router_topk),
        final_norm=_norm_parameters(model),
        output_layer=word_table if model.untie_embeddings_and_output_weights else 0,
    )


def _norm_parameters(model: ModelConfig) -> int:
    return model.hidden_size * (2 if model.normalization == "LayerNorm" else 1)


def _all_layers(model: ModelConfig, experts: int) -> int:
    with_experts = sum(model.is_moe_layer(layer) for layer in range(model.num_layers))
    dense = model.num_layers - with_experts
    total = dense * _dense_layer(model) if dense else 0
    return total + (with_experts * _expert_layer(model, experts) if with_experts else 0)


def active_layer_parameters(model: ModelConfig, layer: int) -> int:
    """Parameters of layer number ``layer`` that one token uses."""
    return _expert_layer(model, model.moe_router_topk) if model.is_moe_layer(layer) else _dense_layer(model)


def _dense_layer(model: ModelConfig) -> int:
    return _attention_and_norms(model) + _mlp(model, model.ffn_size, not model.disable_bias_linear)


def _expert_layer(model: ModelConfig, experts: int) -> int:
    """Parameters of a layer with ``experts`` experts, the router and the shared expert."""
    router = model.hidden_size * (model.num_experts or 0)
    has_bias = not model.disable_bias_linear
    shared = model.moe_shared_expert_intermediate_size
    return (
        _attention_and_norms(model)
        + router
        + experts * _mlp(model, model.expert_ffn_size, has_bias)
        + (_mlp(model, shared, has_bias) if shared else 0)
    )


def _mlp(model: ModelConfig, width: int, has_bias: bool) -> int:
    fc1_width = 2 * width if model.swiglu else width
    weights = model.hidden_size * fc1_width + width * model.hidden_size
    return weights + (fc1_width + model.hidden_size if has_bias else 0)


def _attention_and_norms(model: ModelConfig) -> int:
    hidden = model.hidden_size
    attention_width = model.num_attention_heads * model.head_dim
    qkv_width = attention_width + 2 * model.query_groups * model.head_dim
    weights = hidden * qkv_width + attention_width * hidden
    biases = 0 if model.disable_bias_linear else qkv_width + hidden
    if model.disable_bias_linear and model.add_qkv_bias:
        biases = qkv_width
    return weights + biases + 2 * _norm_parameters(model)


def flops_per_token(config: TrainConfig, vocab_size: int) -> int:
    """FLOPs of forward and backward per token: 6 N + 12 l h s."""
    model = config.model
    counts = count_parameters(config, vocab_size)
    counted = counts.active_layers + counts.final_norm + vocab_size * model.hidden_size
    attention_width = model.num_attention_heads * model.head_dim
    return 6 * counted + 12 * model.num_layers * attention_width * config.training.seq_length
