"""What each parameter is: its place in the global model, how it is divided, and how its gradient is completed.

ParameterLayout is the one place that optimizer, clipping, checkpoint, generation and tests read. ParameterBuilder
makes a rank's parameters and records their layouts. Every parameter is one plain slice of its global tensor along one
dim, drawn in whole from a stream named after it and then cut, so that every layout starts from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from trainer.random_streams import seeded_generator


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter of the global model, and this rank's part in it."""

    name: str
    """Global name: layers are numbered over the whole model, e.g. ``layers.5.attention.qkv.weight``."""
    global_shape: tuple[int, ...]
    """Shape of the undivided tensor; vocabulary tables with their padding."""
    tp_dim: int | None
    """Dim that is divided evenly over tp; None where every tp rank holds the whole."""
    sum_gradient_over_tp: bool
    """Replicated, but fed by sequence-sharded activations: each tp rank has a part of the gradient."""
    tied_over_stages: bool
    """The embedding table that lives on the first and the last stage: their gradients are summed, counted once."""
    decay: bool
    """Whether weight decay applies: matrices yes, biases and norms no."""
    valid_rows: int | None = None
    """Rows of dim 0 that mean something; the rest is vocabulary padding: zeros, never trained, never stored."""

    def shard(self, whole: torch.Tensor, tp: int, tp_rank: int) -> torch.Tensor:
        """The part (a view) of the global tensor that ``tp_rank`` holds."""
        if self.tp_dim is None or tp == 1:
            return whole
        size = self.global_shape[self.tp_dim] // tp
        return whole.narrow(self.tp_dim, tp_rank * size, size)


@dataclass(frozen=True)
class ParameterBuilder:
    """Makes the parameters of one rank's stage and keeps their layouts, both by global name."""

    seed: int
    tp: int
    tp_rank: int
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    prefix: str = ""
    layouts: dict[str, ParameterLayout] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def under(self, name: str) -> ParameterBuilder:
        """The same builder for a part of the model: names get ``name.`` in front, the records are shared."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def weight(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        std: float,
        tp_dim: int | None = None,
        on_sequence_shard: bool = False,
        tied_over_stages: bool = False,
        valid_rows: int | None = None,
    ) -> nn.Parameter:
        """A matrix, normally distributed around 0; the rows from ``valid_rows`` on are zeros.

        Args:
            name: last part of the global name.
            shape: of the global tensor.
            std: standard deviation of the initial values.
            tp_dim: dim divided over tp.
            on_sequence_shard: a replicated parameter that meets activations divided along the sequence.
            tied_over_stages: the parameter lives on two stages.
            valid_rows: rows before the vocabulary padding.
        """
        layout = self._layout(name, shape, tp_dim, on_sequence_shard, True, tied_over_stages, valid_rows)
        generator = seeded_generator("cpu", "initial", self.seed, layout.name)
        # Only the meaningful rows are drawn: how far a layout pads must not move the numbers of the others.
        drawn = torch.empty((valid_rows or shape[0], *shape[1:])).normal_(0.0, std, generator=generator)
        padding = drawn.new_zeros((shape[0] - drawn.shape[0], *shape[1:]))
        return self._add(layout, torch.cat((drawn, padding)) if len(padding) else drawn)

    def vector(
        self, name: str, shape: tuple[int, ...], *, value: float, tp_dim: int | None = None, on_sequence_shard: bool
    ) -> nn.Parameter:
        """A bias or norm weight, all entries ``value`` at the start, free of weight decay."""
        layout = self._layout(name, shape, tp_dim, on_sequence_shard, False, False, None)
        return self._add(layout, torch.full(shape, value))

    def _layout(
        self,
        name: str,
        shape: tuple[int, ...],
        tp_dim: int | None,
        on_sequence_shard: bool,
        decay: bool,
        tied_over_stages: bool,
        valid_rows: int | None,
    ) -> ParameterLayout:
        return ParameterLayout(
            name=self.prefix + name,
            global_shape=shape,
            tp_dim=tp_dim,
            sum_gradient_over_tp=on_sequence_shard and self.sequence_parallel and self.tp > 1,
            tied_over_stages=tied_over_stages,
            decay=decay,
            valid_rows=valid_rows,
        )

    def _add(self, layout: ParameterLayout, whole: torch.Tensor) -> nn.Parameter:
        assert layout.name not in self.parameters, f"{layout.name} is built twice"
        # clone: a shard must not keep the whole alive, nor share its memory.
        local = (
            layout.shard(whole, self.tp, self.tp_rank)
            .to(self.device, self.dtype)
            .clone(memory_format=torch.contiguous_format)
        )
        parameter = nn.Parameter(local)
        self.layouts[layout.name] = layout
        self.parameters[layout.name] = parameter
        return parameter
