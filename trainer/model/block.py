"""One transformer layer: attention and feed-forward part, with norms where model.norm_placement puts them.

Legend: S sequence, B micro-batch, H hidden; ``/t`` = divided over tp.

    pre       h = x + f(norm(x))            Radford et al. 2019 (GPT-2), section 2.3
    post      h = norm(x + f(x))            Vaswani et al. 2017 (arXiv:1706.03762), section 3.1
    sandwich  h = x + norm'(f(norm(x)))     Gemma 2 (arXiv:2408.00118), section 2
    output    h = x + norm'(f(x))           OLMo 2 (arXiv:2501.00656), section 2.1
    parallel  h = x + f(norm(x)) + g(norm(x)), Black et al. 2022 (GPT-NeoX, arXiv:2204.06745), section 2.1

for each sublayer f: attention, then the feed-forward part. Dropout is the last step before an add.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.distributed.random_streams import DropoutSite
from trainer.model.attention.latent_attention import LatentAttention
from trainer.model.attention.self_attention import SelfAttention
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.dropout import hidden_dropout
from trainer.model.mlp import MLP
from trainer.model.moe.layer import MoE
from trainer.model.norm import Norm, Residual
from trainer.model.recompute import Recomputable, forget, recompute
from trainer.model.sharding import ParameterBuilder

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Block(nn.Module):
    """Maps a residual stream of [S(/t), B, H] to the next.

    ``layer`` is the block's number in the whole model.
    """

    def __init__(
        self,
        model: ModelConfig,
        layer: int,
        builder: ParameterBuilder,
        axes: ParallelAxes,
        recomputed: frozenset[str] = frozenset(),
        *,
        defers_add: bool = True,
    ):
        """Build the layer.

        Args:
            model: shape of the model.
            layer: number of the layer in the whole model.
            builder: makes the parameters.
            axes: the axes along which the layer is divided.
            recomputed: parts that backward recomputes: names from training.recompute_modules, or ``layer`` for all.
            defers_add: the next norm makes the last residual add.
        """
        super().__init__()
        self._layer = layer
        self._axes = axes
        self._dropout = model.hidden_dropout
        self._multiplier = model.residual_multiplier
        self._kernels = builder.kernels
        self._recomputed = recomputed
        self._defers_add = defers_add
        self._is_parallel = model.parallel_residual
        placement = model.norm_placement
        self._is_post = placement == "post"
        on_inputs, on_results = placement != "output", placement in ("sandwich", "output")
        # Phi: one norm for both branches.
        has_mlp_norm = on_inputs and not model.shared_parallel_norm

        def norm(name: str, is_there: bool) -> Norm | None:
            return Norm.of(model, builder.under(name)) if is_there else None

        self.attention_norm = norm("attention_norm", on_inputs)
        attention = LatentAttention if model.multi_latent_attention else SelfAttention
        self.attention = attention(
            model, layer, builder.under("attention"), axes, recompute_core="core_attn" in recomputed
        )
        self.attention_output_norm = norm("attention_output_norm", on_results)
        self.mlp_norm = norm("mlp_norm", has_mlp_norm)
        self.mlp: MLP | None = None
        self.moe: MoE | None = None
        if model.is_moe_layer(layer):
            self.moe = MoE(model, builder.under("moe"), axes, recompute_activation="moe_act" in recomputed)
        else:
            self.mlp = MLP(model, builder.under("mlp"), axes.tp, recompute_activation="mlp_act" in recomputed)
        self.mlp_output_norm = norm("mlp_output_norm", on_results)

    def forward(self, stream: Residual, forward_pass: ForwardPass, needs_values: bool = True) -> Residual:
        """Collective: all ranks of the layer's axes. For ``needs_values`` see trainer.model.recompute.Recomputable."""
        # Inside the module rather than around it: the module's hooks, such as those of fully sharded weights, then run
        # once for forward and once for backward, and not a third time for the replay.
        if "layer" in self._recomputed and needs_values:
            # Summed, so that recompute keeps one tensor instead of two.
            return Residual(recompute(partial(self._whole, forward_pass), stream.total()))
        return self._transform(forward_pass, stream, needs_values=needs_values)

    def _whole(self, forward_pass: ForwardPass, hidden: torch.Tensor, *, needs_values: bool) -> torch.Tensor:
        return self._transform(forward_pass, Residual(hidden), needs_values=needs_values).total()

    def _transform(self, forward_pass: ForwardPass, stream: Residual, *, needs_values: bool) -> Residual:
        if self._is_parallel:
            stream = self._side_by_side(forward_pass, stream, needs_values=needs_values)
        elif self._is_post:
            stream = self._attention_part(forward_pass, stream, None)
            stream = self._mlp_part(forward_pass, stream, self.attention_norm, needs_values=True)
            assert self.mlp_norm is not None
            stream = Residual(self.mlp_norm(*stream))
        else:
            stream = self._attention_part(forward_pass, stream, self.attention_norm)
            stream = self._mlp_part(forward_pass, stream, self.mlp_norm, needs_values=needs_values)
        return stream if self._defers_add else Residual(stream.total())

    def _side_by_side(self, forward_pass: ForwardPass, stream: Residual, *, needs_values: bool) -> Residual:
        normed, hidden = _normed(self.attention_norm, stream)
        with self._forget_norm(self.attention_norm, hidden, normed):
            attended = self._attend(forward_pass, normed)
            if self.mlp_norm is None:
                transformed = self._feed_forward(forward_pass, normed, needs_values=needs_values)
        if self.mlp_norm is not None:
            normed = self.mlp_norm(hidden)
            with self._forget_norm(self.mlp_norm, hidden, normed):
                transformed = self._feed_forward(forward_pass, normed, needs_values=needs_values)
        between = self._added(hidden, attended, forward_pass, "attention_output").total()
        return self._added(between, transformed, forward_pass, "mlp_output")

    def _attention_part(self, forward_pass: ForwardPass, stream: Residual, norm: Norm | None) -> Residual:
        normed, hidden = _normed(norm, stream)
        with self._forget_norm(norm, hidden, normed):
            attended = self._attend(forward_pass, normed)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        return self._added(hidden, attended, forward_pass, "attention_output")

    def _mlp_part(
        self, forward_pass: ForwardPass, stream: Residual, norm: Norm | None, *, needs_values: bool
    ) -> Residual:
        normed, hidden = _normed(norm, stream)
        # A norm's backward reads the norm's input.
        needs_values = needs_values or self.mlp_output_norm is not None
        with self._forget_norm(norm, hidden, normed):
            transformed = self._feed_forward(forward_pass, normed, needs_values=needs_values)
        if self.mlp_output_norm is not None:
            transformed = self.mlp_output_norm(transformed)
        return self._added(normed if self._is_post else hidden, transformed, forward_pass, "mlp_output")

    def _attend(self, forward_pass: ForwardPass, normed: torch.Tensor) -> torch.Tensor:
        adds_bias = not self._fuses_bias(forward_pass)
        return self.attention(normed, forward_pass, adds_bias=adds_bias)  # type: ignore[no-any-return]

    def _feed_forward(self, forward_pass: ForwardPass, normed: torch.Tensor, *, needs_values: bool) -> torch.Tensor:
        adds_bias = not self._fuses_bias(forward_pass)
        function: Recomputable
        if self.moe is not None:
            name, function = "moe", partial(self.moe, forward_pass=forward_pass, adds_bias=adds_bias)
        else:
            assert self.mlp is not None
            name, function = "mlp", partial(self.mlp, adds_bias=adds_bias)
        if name in self._recomputed:
            return recompute(function, normed)
        transformed: torch.Tensor = function(normed, needs_values=needs_values)
        return transformed

    def _drops(self, forward_pass: ForwardPass) -> bool:
        return self._dropout > 0.0 and forward_pass.randomness is not None

    def _fuses_bias(self, forward_pass: ForwardPass) -> bool:
        """True if the op of dropout adds a sublayer's bias, in the same pass over memory."""
        return self._drops(forward_pass) and self.mlp_output_norm is None and self._multiplier == 1.0

    def _forget_norm(
        self, norm: Norm | None, hidden: torch.Tensor, normed: torch.Tensor
    ) -> AbstractContextManager[None]:
        if norm is None or "layernorm" not in self._recomputed:
            return nullcontext()
        # The norm itself keeps its input, so that this costs no memory; the norm's hooks do not run in the replay.
        return forget(normed, partial(norm.forward, hidden.detach()))

    def _added(
        self, residual: torch.Tensor, part: torch.Tensor, forward_pass: ForwardPass, site: DropoutSite
    ) -> Residual:
        """``residual`` plus the scaled and dropped ``part``; without dropout the add is left to the next norm."""
        if self._multiplier != 1.0:
            part = part * self._multiplier
        if not self._drops(forward_pass):
            return Residual(residual, part)
        bias = None
        if self._fuses_bias(forward_pass):
            sublayer = self.attention if site == "attention_output" else (self.moe or self.mlp)
            assert sublayer is not None
            bias = sublayer.output_bias
        dropped = hidden_dropout(
            part,
            self._dropout,
            forward_pass.randomness,
            site,
            self._axes,
            self._kernels,
            self._layer,
            bias=bias,
            residual=residual,
        )
        return Residual(dropped)


def _normed(norm: Norm | None, stream: Residual) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the stream, and the stream in one tensor; without a norm that tensor twice."""
    if norm is None:
        total = stream.total()
        return total, total
    if stream.part is None:
        return norm(stream.hidden), stream.hidden
    return norm.of_sum(stream.hidden, stream.part)
