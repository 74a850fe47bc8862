"""Section ``model``: the shape of the transformer."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from trainer.config.layer_pattern import parse_layer_pattern
from trainer.config.sections.section import Section, parse_number


class ModelConfig(Section):
    """Shape of a transformer. trainer.families gives these keys for the published models."""

    architecture: Literal["decoder", "bert", "t5"] = "decoder"
    """decoder: predicts each next token; bert: an encoder with BERT's two heads; t5: encoder and decoder."""

    num_layers: int = Field(gt=0, le=10_000)
    """Number of layers; with architecture t5 those of the encoder."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: PositiveInt
    """Number of query heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Unset: 4 x hidden_size; with swiglu 8/3 x hidden_size, rounded down to a multiple of 64, as in Megatron-LM."""
    kv_channels: PositiveInt | None = None
    """Width of one attention head. Unset: hidden_size / num_attention_heads."""
    group_query_attention: bool = False
    """Several query heads share a key/value head; num_query_groups sets their number."""
    num_query_groups: PositiveInt | None = None
    """Number of key/value heads. Setting this key switches group_query_attention on."""
    max_position_embeddings: PositiveInt | None = None
    """Unset: training.seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope", "alibi", "relative", "none"] = "learned_absolute"
    """alibi: attention falls with the distance of the key, in each head by a fixed slope (BLOOM); relative: T5's bias
    by distance, which only architecture t5 has."""
    position_embedding_offset: NonNegativeInt = 0
    """Rows of the learned position table before that of position 0; OPT has 2."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the angles of rope."""
    rotary_base_local: PositiveFloat | None = None
    """Base in layers with a sliding window, without rope_scaling (Gemma 3). Unset: rotary_base, with rope_scaling."""
    rotary_percent: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the channels of each head that rope rotates."""
    rotary_interleaved: bool = False
    """Rotate channels 2i and 2i + 1 together. Off: channels i and i + half."""
    no_rope_freq: PositiveInt | list[bool] | None = None
    """Layers without rotation (SmolLM3): every N-th layer, or one entry for each, true without. Unset: none."""
    rope_scaling: dict[str, Any] | None = None
    """Change of the angles for longer contexts, in the words of Hugging Face's config.json: ``rope_type`` (default,
    linear, dynamic, llama3, yarn, longrope) with the numbers of that type; see trainer.planning.rope."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm: LayerNorm, or RMSNorm, which has no mean and no bias."""
    norm_epsilon: PositiveFloat = 1e-5
    """Epsilon of the norms, added to the variance or the mean square."""
    norm_placement: Literal["pre", "post", "sandwich", "output"] = "pre"
    """pre: before each sublayer (GPT-2, Llama); post: after each residual add (BERT, OPT-350M); sandwich: before each
    sublayer and on its result (Gemma 2); output: only on the result of each sublayer (OLMo 2)."""
    apply_layernorm_1p: bool = False
    """Norms multiply by 1 + weight, so that weights start at 0 (Gemma)."""
    has_final_norm: bool = True
    """Off: no norm between the last layer and the head (OPT-350M)."""
    parallel_residual: bool = False
    """Attention and feed-forward both read the layer's input, and both results are added to it (GPT-NeoX, Phi)."""
    shared_parallel_norm: bool = False
    """With parallel_residual: one norm for both (Phi). Off: one for each (GPT-NeoX)."""
    embedding_size: PositiveInt | None = None
    """Width of the word table, with a projection to hidden_size and back (OPT-350M). Unset: hidden_size."""
    embedding_scale: PositiveFloat | None = None
    """Factor of the word embedding, rounded to the dtype of the weights (Gemma: the square root of hidden_size)."""
    embedding_layer_norm: bool = False
    """A LayerNorm of the word embedding, before positions are added (BLOOM)."""
    residual_multiplier: PositiveFloat = 1.0
    """Factor of each sublayer's result before it is added to the residual stream (Granite)."""
    logits_scaling: PositiveFloat | None = None
    """Divisor of the logits (Granite). Unset: 1, with mup_base_hidden_size hidden_size / mup_base_hidden_size."""
    swiglu: bool = False
    """Gated feed-forward layers with SiLU, as in Llama."""
    openai_gelu: bool = False
    """Use the tanh approximation of GeLU, as the published GPT-2 weights do (gelu_new). Off: the exact GeLU."""
    squared_relu: bool = False
    """Activation relu(x) squared."""
    activation_func: Literal["gelu", "gelu_tanh", "relu", "squared_relu", "silu"] | None = None
    """Unset: what swiglu, openai_gelu and squared_relu say, else gelu."""
    gated_linear_unit: bool = False
    """Multiply the activated gates by a second product (Shazeer 2020). swiglu switches this on."""
    activation_clamp: PositiveFloat | None = None
    """With a gate: gates are at most this, ups within plus and minus this (gpt-oss: 7)."""
    activation_alpha: PositiveFloat | None = None
    """gpt-oss's gate: x * sigmoid(alpha x), times the up plus 1. Unset: the activation as it is."""
    disable_bias_linear: bool = False
    """Linear layers have no bias."""
    add_qkv_bias: bool = False
    """Bias of the query, key and value products even with disable_bias_linear (Qwen2)."""
    add_attention_output_bias: bool = False
    """Bias of attention's last product even with disable_bias_linear (gpt-oss)."""
    add_head_bias: bool = False
    """Bias of the output layer (Phi)."""
    untie_embeddings_and_output_weights: bool = False
    """The output layer has weights of its own. Off: those of the word table."""
    qk_layernorm: bool = False
    """Normalize queries and keys before rope. With multi_latent_attention the norms are those of the low-rank
    products, which are always there."""
    qk_layernorm_scope: Literal["head", "all"] = "head"
    """head: over the channels of each head (Qwen3, Gemma 3); all: over all heads together (OLMo 2)."""
    softmax_scale: PositiveFloat | None = None
    """Factor of the attention scores. Unset: 1 / sqrt(width of a query head), with mup_base_hidden_size 1 / that width;
    with multi_latent_attention times the square of yarn's mscale_all_dim factor."""
    attn_logit_softcapping: PositiveFloat | None = None
    """c: attention scores become c * tanh(score / c) before the mask (Gemma 2)."""
    final_logit_softcapping: PositiveFloat | None = None
    """c: logits become c * tanh(logit / c) (Gemma 2)."""
    z_loss_coeff: NonNegativeFloat = 0.0
    """Factor of log(Z)^2 in the loss of each token, where Z is the normalizer of its softmax over the vocabulary (PaLM,
    arXiv:2204.02311, section 5). The logged losses contain this term."""
    attention_sinks: bool = False
    """Each head learns a logit that takes part in the softmax without a value (gpt-oss)."""
    window_size: PositiveInt | None = None
    """Tokens that a query sees in layers with a sliding window, itself included. Unset: no such layer."""
    window_layers: list[bool] | Literal["all"] = "all"
    """Layers with a sliding window, one entry each."""
    multi_latent_attention: bool = False
    """DeepSeek-V2's attention: queries, keys and values come from low-rank products."""
    q_lora_rank: PositiveInt | None = None
    """Unset: queries come from one full product."""
    kv_lora_rank: PositiveInt | None = None
    """With multi_latent_attention: width of the low-rank product for keys and values."""
    qk_head_dim: PositiveInt | None = None
    """With multi_latent_attention: channels of a query head without rotation."""
    qk_pos_emb_head_dim: PositiveInt | None = None
    """With multi_latent_attention: rotated channels of a query head; their key is one for all heads."""
    v_head_dim: PositiveInt | None = None
    """With multi_latent_attention: channels of a value head."""
    latent_norm_epsilon: PositiveFloat | None = None
    """With multi_latent_attention: epsilon of the norms of the low-rank products. Unset: norm_epsilon."""
    mtp_num_layers: NonNegativeInt = 0
    """Prediction layers after the last one, each of which predicts one token more (multi-token prediction,
    DeepSeek-V3)."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Factor of the mean of the prediction layers' losses."""
    num_tokentypes: NonNegativeInt | None = None
    """With architecture bert: rows of the token type table; 0: no table. Unset: 2 with bert_binary_head, else 0."""
    bert_binary_head: bool = True
    """With architecture bert: pooler and next-sentence head."""
    decoder_num_layers: PositiveInt | None = None
    """With architecture t5: layers of the decoder. Unset: num_layers, which counts those of the encoder."""
    relative_attention_num_buckets: PositiveInt = 32
    """With position_embedding_type relative: number of learned biases per head."""
    relative_attention_max_distance: PositiveInt = 128
    """With position_embedding_type relative: distance from which all tokens share the last bias."""
    scale_decoder_output: bool = True
    """With architecture t5 and tied embeddings: divide the decoder's output by the square root of hidden_size, as in
    the first T5. Off: Megatron-LM's T5."""
    stack_output_dropout: bool = True
    """With architecture t5: hidden_dropout also after the last norm of encoder and decoder. Off: Megatron-LM's T5."""
    attention_dropout: float = Field(0.1, ge=0.0, lt=1.0)
    """Probability that an attention weight is dropped. On GPUs whose fused kernels draw the masks, the masks differ
    between parallel layouts; elsewhere each layout has the same."""
    hidden_dropout: float = Field(0.1, ge=0.0, lt=1.0)
    """Probability that an element is dropped, after the embedding and before each residual add."""
    init_method_std: PositiveFloat = 0.02
    """Standard deviation of new weights; that of the last product of each sublayer is divided by sqrt(2 x
    num_layers)."""
    init_method: Literal["normal", "xavier_uniform"] = "normal"
    """Distribution of new weights. xavier_uniform: uniform up to sqrt(6 / (rows + columns)) of each weight, without
    init_method_std (Glorot and Bengio 2010)."""
    embedding_init_method_std: PositiveFloat | None = None
    """Standard deviation of new word, position and token type tables. Unset: they are drawn as other weights."""
    mup_base_hidden_size: PositiveInt | None = None
    """hidden_size of the model whose lr this wider one takes (maximal update parametrization, arXiv:2203.03466). With
    the ratio m of both widths, matrices but tables and the output layer have lr / m, adam_eps / m and init_method_std /
    sqrt(m); with optimizer sgd all other weights have lr x m. See softmax_scale and logits_scaling."""
    vocab_size: int | None = Field(None, gt=0, lt=2**31)
    """Unset: the tokenizer's vocabulary size from the data's manifest. With NullTokenizer: the number of token ids; the
    model then has one more token, which ends documents."""
    make_vocab_size_divisible_by: PositiveInt = 128
    """Rows of the word table are padded to a multiple of this number times tp."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """flash: the flash-attn package; fused: PyTorch's kernels; unfused or local: plain attention, which with
    attention_dropout keeps the scores in memory; auto: the fastest backend that is available and supports the
    config."""
    num_experts: PositiveInt | None = None
    """Experts per mixture-of-experts layer. Unset: a dense model."""
    moe_layer_freq: PositiveInt | list[bool] = 1
    """Put experts in every N-th layer, starting with layer 0; or one entry for each layer."""
    moe_ffn_hidden_size: PositiveInt | None = None
    """Feed-forward width of one expert. Unset: ffn_hidden_size."""
    moe_router_topk: PositiveInt = 2
    """Experts that process each token."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's products into scores."""
    moe_router_pre_softmax: bool = False
    """Take the softmax over all experts, before the top-k selection. Off: over the selected experts only."""
    moe_router_norm_topk_prob: bool = True
    """With sigmoid scores: divide the chosen scores by their sum."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Factor of the chosen scores (DeepSeek-V3: 2.5). Unset: 1."""
    moe_router_enable_expert_bias: bool = False
    """Add a bias to the scores for the choice of experts only. After each step it moves against the load (DeepSeek-V3,
    arXiv:2408.15664)."""
    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """With moe_router_enable_expert_bias: change of each bias per step."""
    moe_router_num_groups: PositiveInt | None = None
    """Divide the experts into groups, and choose only from the moe_router_group_topk best groups."""
    moe_router_group_topk: PositiveInt | None = None
    """With moe_router_num_groups: number of groups that a token chooses its experts from."""
    moe_router_group_score: Literal["max", "top2"] = "top2"
    """Score of a group: its best expert (DeepSeek-V2), or the sum of its two best (DeepSeek-V3)."""
    moe_router_bias: bool = False
    """Bias of the router's product (gpt-oss)."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none"] = "aux_loss"
    """Balance of the experts' load. aux_loss: a loss over each micro-batch, seq_aux_loss: over each sequence, both with
    moe_aux_loss_coeff. sinkhorn: in training the choice is even over each micro-batch, and scores are sigmoids with
    moe_router_topk 1, else a softmax over all experts."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Factor of the load-balancing loss; 0 disables it."""
    moe_z_loss_coeff: NonNegativeFloat | None = None
    """Factor of the router's z-loss, which keeps its products small. Unset: no such loss."""
    moe_expert_capacity_factor: PositiveFloat | None = None
    """Largest number of tokens per expert in training, as a multiple of an even share. Unset: no token is dropped."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """With moe_expert_capacity_factor, the tokens that an expert keeps: those with the best scores, or the first."""
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Feed-forward width of the shared expert, which processes every token. Unset: no shared expert."""
    moe_shared_expert_gate: bool = False
    """Multiply the shared expert's result by the sigmoid of one product of the token (Qwen2-MoE)."""

    @field_validator("moe_layer_freq", "no_rope_freq", "window_layers", mode="before")
    @classmethod
    def _parse_layer_pattern(cls, value: Any) -> Any:
        return parse_layer_pattern(value)

    @field_validator("moe_router_load_balancing_type", mode="before")
    @classmethod
    def _check_balance(cls, value: Any) -> Any:
        if value in ("global_aux_loss", "quantile_balancing"):
            raise ValueError(
                "loads are not balanced over the global batch; use aux_loss, over each micro-batch, or seq_aux_loss"
            )
        return value

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _read_numbers(cls, value: Any) -> Any:
        # On the command line every value is text.
        if isinstance(value, dict):
            return {name: parse_number(text) if isinstance(text, str) else text for name, text in value.items()}
        return value

    def is_moe_layer(self, layer: int) -> bool:
        """True if layer number ``layer`` of the whole model has experts; prediction layers are like the last one."""
        if self.num_experts is None:
            return False
        layer = min(layer, self.num_layers - 1)
        if isinstance(self.moe_layer_freq, list):
            return self.moe_layer_freq[layer]
        return layer % self.moe_layer_freq == 0

    @property
    def router_score_function(self) -> Literal["softmax", "sigmoid"]:
        """``moe_router_score_function``, or that of sinkhorn."""
        if self.moe_router_load_balancing_type == "sinkhorn":
            return "sigmoid" if self.moe_router_topk == 1 else "softmax"
        return self.moe_router_score_function

    @property
    def router_pre_softmax(self) -> bool:
        """``moe_router_pre_softmax``, or that of sinkhorn."""
        if self.moe_router_load_balancing_type == "sinkhorn":
            return self.moe_router_topk > 1
        return self.moe_router_pre_softmax

    @property
    def has_dense_layers(self) -> bool:
        """True if some layer has a dense feed-forward network."""
        return not all(self.is_moe_layer(layer) for layer in range(self.num_layers))

    @property
    def is_encoder_decoder(self) -> bool:
        """True if the model has two stacks, of which the second attends to the first."""
        return self.architecture == "t5"

    @property
    def num_decoder_layers(self) -> int:
        """Layers of the decoder of an encoder-decoder model, with the default filled in."""
        return self.decoder_num_layers or self.num_layers

    @property
    def scales_decoder_output(self) -> bool:
        """True if the decoder's output is divided by the square root of hidden_size."""
        return self.is_encoder_decoder and self.scale_decoder_output and not self.untie_embeddings_and_output_weights

    @property
    def word_embedding_size(self) -> int:
        """Width of the word table, with the default filled in."""
        return self.embedding_size or self.hidden_size

    @property
    def is_causal(self) -> bool:
        """True if every token attends to itself and earlier tokens only."""
        return self.architecture == "decoder"

    @property
    def token_types(self) -> int:
        """Rows of the token type table, with the default filled in."""
        if self.num_tokentypes is not None:
            return self.num_tokentypes
        return 2 if self.architecture == "bert" and self.bert_binary_head else 0

    @property
    def has_embedding_norm(self) -> bool:
        """True if a norm follows the sum of the embeddings: in BERT with post-norm, as the first norm of the stack."""
        return self.architecture == "bert" and self.norm_placement == "post"

    @property
    def has_head_bias(self) -> bool:
        """True if the output layer has a bias, as BERT's always has."""
        return self.add_head_bias or self.architecture == "bert"

    @property
    def activation(self) -> Literal["gelu", "gelu_tanh", "relu", "squared_relu", "silu"]:
        """Activation of the feed-forward layers, with the default filled in."""
        if self.activation_func is not None:
            return self.activation_func
        if self.swiglu:
            return "silu"
        return "gelu_tanh" if self.openai_gelu else "squared_relu" if self.squared_relu else "gelu"

    @property
    def is_gated(self) -> bool:
        """True if feed-forward layers multiply activated gates by ups."""
        return self.swiglu or self.gated_linear_unit

    def window_of(self, layer: int) -> int | None:
        """Tokens that a query of layer number ``layer`` sees, itself included; None for all before it.

        Prediction layers are like the last one.
        """
        if self.window_layers == "all" or self.window_layers[min(layer, self.num_layers - 1)]:
            return self.window_size
        return None

    def has_rope(self, layer: int) -> bool:
        """True if layer number ``layer`` rotates queries and keys; prediction layers are like the last one."""
        layer = min(layer, self.num_layers - 1)
        if isinstance(self.no_rope_freq, list):
            skips = self.no_rope_freq[layer]
        else:
            skips = self.no_rope_freq is not None and (layer + 1) % self.no_rope_freq == 0
        return self.position_embedding_type == "rope" and not skips

    @property
    def has_qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        return self.add_qkv_bias or not self.disable_bias_linear

    @property
    def has_attention_output_bias(self) -> bool:
        """True if attention's last product has a bias."""
        return self.add_attention_output_bias or not self.disable_bias_linear

    @property
    def expert_ffn_size(self) -> int:
        """Feed-forward width of one expert, with the default filled in."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer, with the default filled in."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(self.hidden_size * 8 / 3) // 64 * 64 or 64 if self.is_gated else 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotated_channels(self) -> int:
        """Channels of each head that rope rotates."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim or 0
        return int(self.head_dim * self.rotary_percent)

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    def padded_vocab_size(self, vocab_size: int, tp: int) -> int:
        """Rows of the embedding table: ``vocab_size`` padded for ``tp`` ranks.

        The padding rows never take part in the loss (see trainer.model.tensor_parallel.cross_entropy), so that the
        loss does not depend on the parallel layout.
        """
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-vocab_size // multiple) * multiple
