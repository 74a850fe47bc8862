"""One layer of an encoder or a decoder: attention, in the decoder also to the encoder's output, and feed-forward part.

Legend: S sequence and K encoder sequence, B micro-batch, H hidden, A heads; ``/t`` = divided over tp.
Each sublayer f adds f(norm(x)) to the residual stream x (Raffel et al. 2020, arXiv:1910.10683, section 2.1).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.distributed.random_streams import DropoutSite
from trainer.model.attention.core_attention import AttentionCore
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.dropout import hidden_dropout
from trainer.model.encoder_decoder.attention import Attention
from trainer.model.mlp import MLP
from trainer.model.norm import Norm, Residual
from trainer.model.recompute import forget, recompute
from trainer.model.sharding import ParameterBuilder
from trainer.ops.attention.backend import choose_backend
from trainer.ops.attention.settings import AttentionSettings

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Source(NamedTuple):
    """The encoder's output, as the layers of the decoder attend to it.

    Attributes:
        encoded: [K, B, H], the output of enter_parallel_region.
        mask: [B, K], False for padding.
    """

    encoded: torch.Tensor
    mask: torch.Tensor


class Layer(nn.Module):
    """Maps a residual stream of [S(/t), B, H] to the next."""

    def __init__(
        self,
        model: ModelConfig,
        number: int,
        builder: ParameterBuilder,
        axes: ParallelAxes,
        recomputed: frozenset[str],
        *,
        is_decoder: bool,
    ):
        """Build the layer.

        Args:
            model: shape of the model.
            number: number of the layer, counted over encoder and decoder; it addresses the dropout streams.
            builder: makes the parameters.
            axes: the axes along which the layer is divided.
            recomputed: parts that backward recomputes: names from training.recompute_modules.
            is_decoder: the layer is causal, and attends to the encoder's output too.
        """
        super().__init__()
        self._number = number
        self._axes = axes
        self._dropout = model.hidden_dropout
        self._kernels = builder.kernels
        self._recomputed = recomputed
        settings = replace(AttentionSettings.of(model, 0), causal=is_decoder)
        backend = choose_backend(model, builder.dtype, builder.device, builder.kernels.flash_attn)
        core = AttentionCore(number, model.attention_dropout, axes, settings, backend, builder.kernels)
        attention = partial(Attention, model, recompute_core="core_attn" in recomputed)
        self.attention_norm = Norm.of(model, builder.under("attention_norm"))
        self.attention = attention(builder.under("attention"), core)
        self.cross_attention_norm: Norm | None = None
        self.cross_attention: Attention | None = None
        if is_decoder:
            core = replace(core, settings=replace(settings, causal=False), site="cross_attention")
            self.cross_attention_norm = Norm.of(model, builder.under("cross_attention_norm"))
            self.cross_attention = attention(builder.under("cross_attention"), core)
        self.mlp_norm = Norm.of(model, builder.under("mlp_norm"))
        self.mlp = MLP(model, builder.under("mlp"), axes.tp)

    def forward(
        self,
        stream: Residual,
        forward_pass: ForwardPass,
        bias: torch.Tensor | None,
        source: Source | None = None,
        needs_values: bool = True,
    ) -> Residual:
        """Collective: all tp ranks.

        Args:
            stream: the residual stream.
            forward_pass: randomness; for the attention to the own stack also rotation and padding.
            bias: [A/t, S, S] or [B, A/t, S, S], added to the scores of the attention to the own stack; None: no bias.
            source: the encoder's output, for a layer of the decoder.
            needs_values: see trainer.model.recompute.Recomputable.
        """
        normed, hidden = _normed(self.attention_norm, stream)
        with self._forget_norm(self.attention_norm, hidden, normed):
            attended = self.attention(normed, forward_pass, bias=bias, key_mask=forward_pass.key_mask)
        stream = self._added(hidden, attended, forward_pass, "attention_output")
        if self.cross_attention is not None:
            assert self.cross_attention_norm is not None and source is not None
            normed, hidden = _normed(self.cross_attention_norm, stream)
            with self._forget_norm(self.cross_attention_norm, hidden, normed):
                attended = self.cross_attention(normed, forward_pass, source=source.encoded, key_mask=source.mask)
            stream = self._added(hidden, attended, forward_pass, "cross_attention_output")
        normed, hidden = _normed(self.mlp_norm, stream)
        with self._forget_norm(self.mlp_norm, hidden, normed):
            if "mlp" in self._recomputed:
                transformed = recompute(self.mlp, normed)
            else:
                transformed = self.mlp(normed, needs_values=needs_values)
        return self._added(hidden, transformed, forward_pass, "mlp_output")

    def _forget_norm(self, norm: Norm, hidden: torch.Tensor, normed: torch.Tensor) -> AbstractContextManager[None]:
        if "layernorm" not in self._recomputed:
            return nullcontext()
        # The norm itself keeps its input, so that this costs no memory.
        return forget(normed, partial(norm.forward, hidden.detach()))

    def _added(
        self, residual: torch.Tensor, part: torch.Tensor, forward_pass: ForwardPass, site: DropoutSite
    ) -> Residual:
        """``residual`` plus the dropped ``part``; without dropout the add is left to the next norm."""
        randomness = forward_pass.randomness
        if randomness is None or self._dropout == 0.0:
            return Residual(residual, part)
        return Residual(
            hidden_dropout(
                part, self._dropout, randomness, site, self._axes, self._kernels, self._number, residual=residual
            )
        )


def _normed(norm: Norm, stream: Residual) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the stream, and the stream in one tensor."""
    if stream.part is None:
        return norm(stream.hidden), stream.hidden
    return norm.of_sum(stream.hidden, stream.part)
