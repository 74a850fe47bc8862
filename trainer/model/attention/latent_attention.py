"""Multi-head latent attention: queries, keys and values come from low-rank products.

Legend: S sequence, B micro-batch, H hidden, A heads, Q and L ranks of the queries' and of the keys' and values' latent,
N channels of a query head without rotation, P rotated channels, V channels of a value head; ``/t`` = divided over tp.
DeepSeek-V2 (arXiv:2405.04434), section 2.1, equations 9 to 19. Keys and values are computed whole; nothing is absorbed
into other products, which saves time only in generation.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.config.sections.scales import matrix_std
from trainer.model.attention.core_attention import AttentionCore, attend
from trainer.model.attention.output_projection import build_projection
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.norm import Norm
from trainer.model.recompute import recompute
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel.collectives import TensorParallel, enter_parallel_region
from trainer.model.tensor_parallel.linear import ColumnParallelLinear
from trainer.ops.attention.backend import choose_backend
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.rotary import rotate
from trainer.planning.rope import RopeScaling


class LatentAttention(nn.Module):
    """[S(/t), B, H] -> [S(/t), B, H].

    Every tp rank computes the latents, under sequence parallelism those of its part of the sequence, and from them A/t
    whole heads. One collective in each direction takes the latents and the shared rotated key into that region.
    """

    def __init__(
        self,
        model: ModelConfig,
        layer: int,
        builder: ParameterBuilder,
        axes: ParallelAxes,
        recompute_core: bool = False,
    ):
        """Build the layer's attention; with ``recompute_core`` backward recomputes scores that forward would keep.

        Raises:
            ValueError: tp does not divide the heads.
        """
        super().__init__()
        tp, heads, hidden = axes.tp, model.num_attention_heads, model.hidden_size
        if heads % tp.size:
            raise ValueError(f"{heads} heads cannot be divided over {tp.size} tensor-parallel ranks")
        self._tp = tp
        self._plain, self._rotated = model.qk_head_dim or 0, model.qk_pos_emb_head_dim or 0
        self._value_width, self._rank = model.v_head_dim or 0, model.kv_lora_rank or 0
        self._is_interleaved = model.rotary_interleaved
        self._has_window = model.window_of(layer) is not None
        self._recompute_core = recompute_core
        settings = replace(AttentionSettings.of(model, layer), scale=model.softmax_scale or _softmax_scale(model))
        backend = choose_backend(model, builder.dtype, builder.device, builder.kernels.flash_attn)
        self._core = AttentionCore(layer, model.attention_dropout, axes, settings, backend, builder.kernels)
        products = _Products(model, builder, tp)
        width = heads * (self._plain + self._rotated)
        self.query: ColumnParallelLinear | None = None
        self.query_down: ColumnParallelLinear | None = None
        # Small models (DeepSeek-V2-Lite) have full queries; only keys and values are always compressed.
        if model.q_lora_rank is None:
            self.query = products.divided("query", (width, hidden))
        else:
            self.query_down = products.whole("query_down", (model.q_lora_rank, hidden))
            self.query_norm = products.norm("query_norm", model.q_lora_rank)
            self.query_up = products.divided("query_up", (width, model.q_lora_rank))
        # The down projections are whole on every tp rank: all heads read the same compressed vector.
        self.key_value_down = products.whole("key_value_down", (self._rank + self._rotated, hidden))
        self.key_value_norm = products.norm("key_value_norm", self._rank)
        self.key_value_up = products.divided("key_value_up", (heads * (self._plain + self._value_width), self._rank))
        width = heads * self._value_width
        self.projection = build_projection(model, width, builder.under("projection"), tp)

    @property
    def output_bias(self) -> nn.Parameter | None:
        """[H], the bias added to the output."""
        return self.projection.bias

    def forward(self, hidden: torch.Tensor, forward_pass: ForwardPass, *, adds_bias: bool = True) -> torch.Tensor:
        """Collective: all tp and cp ranks. Without ``adds_bias`` the next op adds ``output_bias``."""
        query, key, value = (heads.permute(1, 2, 0, 3) for heads in self._heads(hidden, forward_pass))
        core = partial(self._attend, forward_pass)
        # Other kernels keep no scores, only tensors that are kept anyway: a replay would save nothing.
        replays = self._recompute_core and self._core.keeps_scores(forward_pass)
        context = recompute(core, query, key, value) if replays else core(query, key, value)
        return self.projection(context.permute(2, 0, 1, 3).flatten(2), adds_bias=adds_bias)  # type: ignore[no-any-return]

    def _heads(
        self, hidden: torch.Tensor, forward_pass: ForwardPass
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query and key [S, B, A/t, N+P] and value [S, B, A/t, V]."""
        rotary = forward_pass.rotary_of(has_window=self._has_window)
        assert rotary is not None, "latent attention has rotary positions"
        turn = partial(rotate, cos=rotary.cos, sin=rotary.sin, interleaved=self._is_interleaved)
        latent, shared_key = self.key_value_down(hidden).split((self._rank, self._rotated), dim=-1)
        latents = [self.key_value_norm(latent), shared_key]  # [S(/t), B, L], [S(/t), B, P]
        if self.query_down is not None:
            latents.append(self.query_norm(self.query_down(hidden)))  # [S(/t), B, Q]
        widths = [part.shape[-1] for part in latents]
        whole = enter_parallel_region(torch.cat(latents, dim=-1), self._tp)
        latent, shared_key, *rest = torch.split(whole, widths, dim=-1)
        query = self.query(hidden) if self.query is not None else self.query_up(rest[0], inside_tp_region=True)
        plain, rotated = query.unflatten(-1, (-1, self._plain + self._rotated)).split(
            (self._plain, self._rotated), dim=-1
        )
        query = torch.cat((plain, turn(rotated)), dim=-1)
        plain, value = (
            self.key_value_up(latent, inside_tp_region=True)
            .unflatten(-1, (-1, self._plain + self._value_width))
            .split((self._plain, self._value_width), dim=-1)
        )
        shared_key = turn(shared_key.unsqueeze(2)).expand(*plain.shape[:3], -1)
        return query, torch.cat((plain, shared_key), dim=-1), value

    def _attend(
        self,
        forward_pass: ForwardPass,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        needs_values: bool = True,
    ) -> torch.Tensor:
        del needs_values  # attention's own backward reads the values, so that nothing can be left out
        return attend(query, key, value, forward_pass, self._core)


def _softmax_scale(model: ModelConfig) -> float:
    width = (model.qk_head_dim or 0) + (model.qk_pos_emb_head_dim or 0)
    return RopeScaling.of(model).score_factor / math.sqrt(width)


class _Products:
    """Makes the products without bias, and the norms between them."""

    def __init__(self, model: ModelConfig, builder: ParameterBuilder, tp: TensorParallel):
        self._model, self._builder, self._tp = model, builder, tp

    def divided(self, name: str, shape: tuple[int, int]) -> ColumnParallelLinear:
        """A product whose outputs, whole heads, are divided over tp."""
        weight = self._builder.under(name).weight("weight", shape, std=matrix_std(self._model), tp_dim=0)
        return ColumnParallelLinear(weight, None, self._tp)

    def whole(self, name: str, shape: tuple[int, int]) -> ColumnParallelLinear:
        """A product that every tp rank computes, under sequence parallelism of its part of the sequence."""
        weight = self._builder.under(name).weight("weight", shape, std=matrix_std(self._model), on_sequence_shard=True)
        return ColumnParallelLinear(weight, None, TensorParallel())

    def norm(self, name: str, width: int) -> Norm:
        """The norm of a latent; its input is a sequence shard as that of the layers' norms."""
        model = self._model
        epsilon = model.latent_norm_epsilon or model.norm_epsilon
        return Norm(model.normalization, width, epsilon, self._builder.under(name))
