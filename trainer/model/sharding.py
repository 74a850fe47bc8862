"""Layout of each parameter: place in the model, division over ranks, gradient reduction.

Optimizer, clipping, reductions, checkpoint, generation and tests all read ParameterLayout.
ParameterBuilder makes a rank's parameters and records their layouts. A rank's shard of a parameter consists of shard
boxes of its global tensor. The initial values of a parameter come from random streams named after the parameter: see
trainer.model.initial_values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from trainer.distributed.mesh import copies_of_groups
from trainer.model.initial_values import RandomMatrix
from trainer.model.shard_box import Box
from trainer.ops.dispatch.registry import Kernels

if TYPE_CHECKING:
    from trainer.distributed.mesh import ParallelMesh


@dataclass(frozen=True)
class PackedHeads:
    """Rows of a packed query-key-value weight, or of a part of one.

    The rows are ordered by query group: the queries, then the key, then the value.

    Attributes:
        groups: query groups (key and value heads) of the whole model.
        queries_per_group: query heads per group; 0 if there are only keys.
        head_dim: rows per head.
        shared: heads per group that all queries of the group use: 2, the key and the value, or 1, the key alone.
    """

    groups: int
    queries_per_group: int
    head_dim: int
    shared: int = 2

    def rows(self, tp: int, tp_rank: int) -> tuple[range, range]:
        """Global rows of a tp rank that holds a part of one group.

        The rows are its queries, then the shared heads.
        Ranks that share a group each hold a part of its queries, and all of its key and value.
        """
        copies = copies_of_groups(self.groups, tp)
        group, part = divmod(tp_rank, copies)
        base = group * (self.queries_per_group + self.shared) * self.head_dim
        queries = self.queries_per_group // copies * self.head_dim
        key = base + self.queries_per_group * self.head_dim
        return range(base + part * queries, base + (part + 1) * queries), range(key, key + self.shared * self.head_dim)


@dataclass(frozen=True)
class ParameterLayout:
    """Layout of one parameter: its division, and the ranks that sum its gradient.

    Gradients are always summed over the ranks that hold copies and see other samples: ``dp_cp``, or ``expert_dp`` for
    experts. The other flags name additional sums.
    """

    name: str
    """Global name: layers are numbered over the whole model, e.g. ``layers.5.attention.qkv.weight``."""
    global_shape: tuple[int, ...]
    """Shape of the undivided tensor; vocabulary tables with their padding."""
    tp_dim: int | None
    """Dim that is divided over tp, of experts over the ranks of tp that divide one; None if each has the whole."""
    partial_over_tp: bool
    """Replicated, but each tp rank sees only a part of the parameter's inputs: the gradient is summed over tp, of
    experts over the ranks of tp that divide one."""
    tied_over_stages: bool
    """The embedding table that two pipeline ranks hold: their gradients are summed, and the table counts once."""
    is_matrix: bool
    """The parameter is a matrix of a product or a table of a look-up; False for biases and norms of any shape."""
    valid_rows: int | None = None
    """Rows of dim 0 that hold vocabulary; the rest is padding: zeros, never trained, never stored."""
    is_expert: bool = False
    """Dim 0 counts the experts of a layer and is divided over ep."""
    packed_heads: PackedHeads | None = None
    """Dim 0 packs query, key and value heads; if tp exceeds the groups, key and value gradients are summed over
    the ``kv`` ranks."""
    is_table: bool = False
    """A table of positions or token types; see also is_vocabulary_table."""

    @property
    def decay(self) -> bool:
        """True if weight decay applies: matrices yes, biases and norms no."""
        return self.is_matrix

    @property
    def is_vocabulary_table(self) -> bool:
        """True for the table of the word embeddings and that of the output layer, not for a bias of the output."""
        return self.is_matrix and self.valid_rows is not None

    @property
    def is_hidden_matrix(self) -> bool:
        """True for the matrix of a product other than the output layer's."""
        return self.is_matrix and not self.is_table and not self.is_vocabulary_table

    def boxes(self, mesh: ParallelMesh) -> tuple[Box, ...]:
        """The rank's shard boxes of the global tensor, in order; no box contains padding.

        If other tp ranks hold the same key and value heads, these heads are the last box.
        """
        # Other tp ranks with the same part of an expert count as its copies along dp.
        tp, tp_rank = (mesh.expert_tp, mesh.expert_tp_rank) if self.is_expert else (mesh.tp, mesh.tp_rank)
        owns = tp_rank == 0 or self.tp_dim is not None
        owns = owns and (mesh.is_first_stage or not self.tied_over_stages)
        if self.has_kv_copies(mesh):
            assert self.packed_heads is not None
            queries, shared = self.packed_heads.rows(mesh.tp, mesh.tp_rank)
            width = math.prod(self.global_shape[1:])
            last = self._rows(shared, len(queries) * width, owns and mesh.tp_rank % mesh.kv_copies == 0)
            return (self._rows(queries, 0, owns), last) if queries else (last,)
        offset, shape = [0] * len(self.global_shape), list(self.global_shape)
        for dim, size, rank in ((self.tp_dim, tp, tp_rank), (self._expert_dim, mesh.ep, mesh.ep_rank)):
            if dim is not None:
                shape[dim] //= size
                offset[dim] = rank * shape[dim]
        if self.valid_rows is not None:
            shape[0] = max(0, min(self.valid_rows - offset[0], shape[0]))
        return (Box(tuple(offset), tuple(shape), 0, owns),) if shape[0] else ()

    @property
    def _expert_dim(self) -> int | None:
        return 0 if self.is_expert else None

    def _rows(self, rows: range, start: int, is_owned: bool) -> Box:
        rest = self.global_shape[1:]
        return Box((rows.start, *[0] * len(rest)), (len(rows), *rest), start, is_owned)

    def has_kv_copies(self, mesh: ParallelMesh) -> bool:
        """True if other tp ranks hold the same key and value rows."""
        return self.packed_heads is not None and mesh.kv_copies > 1

    def local_shape(self, mesh: ParallelMesh) -> tuple[int, ...]:
        """Shape of the rank's shard, including vocabulary padding."""
        shape = list(self.global_shape)
        if self.has_kv_copies(mesh):
            return (sum(box.shape[0] for box in self.boxes(mesh)), *shape[1:])
        if self.tp_dim is not None:
            shape[self.tp_dim] //= mesh.expert_tp if self.is_expert else mesh.tp
        if self.is_expert:
            shape[0] //= mesh.ep
        return tuple(shape)

    def shard(self, whole: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
        """The rank's shard of the global tensor, in newly allocated memory.

        Vocabulary padding is zeros.
        """
        part = whole.new_zeros(self.local_shape(mesh))
        for box in self.boxes(mesh):
            source = whole
            for dim, (first, length) in enumerate(zip(box.offset, box.shape, strict=True)):
                source = source.narrow(dim, first, length)
            part.view(-1)[box.start : box.stop].view(box.shape).copy_(source)
        return part

    def owned_ranges(self, mesh: ParallelMesh, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of this rank's flattened shard, between ``start`` and ``stop``, that this rank owns.

        Ignores ownership among copies along dp and cp: see trainer.data_parallel.parameter_shards.
        """
        for box in self.boxes(mesh):
            low, high = max(start, box.start), min(stop, box.stop)
            if box.is_owned and low < high:
                yield low, high


Fill = Callable[[torch.Tensor, int], object]
"""Writes initial values into a range, 1-D, of a rank's flattened shard that begins at a position."""


@dataclass(frozen=True)
class ParameterBuilder:
    """Makes the parameters of one rank and keeps parameters and layouts by global name."""

    seed: int
    mesh: ParallelMesh
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels = Kernels()
    """Ops that the built layers use."""
    draws: bool = True
    """Off: matrices are zeros instead of random, for weights that are loaded at once."""
    init_method: Literal["normal", "xavier_uniform"] = "normal"
    """Distribution of matrices."""
    fills: dict[str, Fill] | None = None
    """Receives the writers of the initial values, for parameters that are filled later; None: at once."""
    has_memory: bool = True
    """Off: parameters are on torch's meta device, without memory, for a store that shards them before it allocates."""
    prefix: str = ""
    layouts: dict[str, ParameterLayout] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Buffers in checkpoints: no gradient reaches them."""

    def under(self, name: str) -> ParameterBuilder:
        """The same builder with prefix ``name.`` for global names; both builders share their records."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def weight(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        std: float,
        is_normal: bool = False,
        tp_dim: int | None = None,
        on_sequence_shard: bool = False,
        partial_over_tp: bool = False,
        tied_over_stages: bool = False,
        valid_rows: int | None = None,
        packed_heads: PackedHeads | None = None,
        is_table: bool = False,
    ) -> nn.Parameter:
        """A matrix, distributed around 0 by ``init_method``; rows from ``valid_rows`` on are zeros.

        Args:
            name: last component of the global name.
            shape: of the global tensor.
            std: standard deviation of the initial values, if they are normally distributed.
            is_normal: they are, whatever ``init_method`` says.
            tp_dim: dim divided over tp.
            on_sequence_shard: a replicated parameter of an op on activations divided along the sequence.
            partial_over_tp: a replicated parameter whose gradient is complete only after a sum over tp.
            tied_over_stages: two pipeline ranks hold the parameter.
            valid_rows: rows before the vocabulary padding.
            packed_heads: order of the heads in the rows of a query-key-value weight.
            is_table: a table of positions or token types.
        """
        layout = ParameterLayout(
            name=self.prefix + name,
            global_shape=shape,
            tp_dim=tp_dim,
            partial_over_tp=self._is_partial(partial_over_tp, on_sequence_shard),
            tied_over_stages=tied_over_stages,
            is_matrix=True,
            valid_rows=valid_rows,
            packed_heads=packed_heads,
            is_table=is_table,
        )
        # Only the vocabulary rows are drawn: the amount of padding of a layout must not change their values.
        drawn = self._random((valid_rows or shape[0], *shape[1:]), std, layout.name, is_normal=is_normal)
        return self._add(layout, partial(drawn.fill, boxes=layout.boxes(self.mesh), dtype=self.dtype))

    def _random(self, shape: tuple[int, ...], std: float, *address: int | str, is_normal: bool = False) -> RandomMatrix:
        is_normal = is_normal or self.init_method == "normal"
        # Glorot and Bengio 2010, equation 16. The rows are those of the whole matrix: packed parts, such as gates and
        # ups, are one matrix, as in Megatron-LM; tp divides no bound.
        spread = std if is_normal else math.sqrt(6 / (math.prod(shape[:-1]) + shape[-1]))
        return RandomMatrix(("initial", self.seed, *address), shape, spread, is_normal)

    def experts(self, name: str, shape: tuple[int, ...], *, std: float, tp_dim: int | None = None) -> nn.Parameter:
        """The matrices of all experts of a layer, [experts, ...].

        This rank keeps E/ep of them.

        Each expert has its own random stream, so that a rank draws only its own experts.

        Args:
            name: last component of the global name.
            shape: of the global tensor; dim 0 counts the experts.
            std: as in ``weight``.
            tp_dim: dim of ``shape`` divided over tp.
        """
        layout = ParameterLayout(self.prefix + name, shape, tp_dim, False, False, is_matrix=True, is_expert=True)
        one = replace(layout, global_shape=shape[1:], tp_dim=None if tp_dim is None else tp_dim - 1, is_expert=False)
        part_of_one = replace(self.mesh, tp=self.mesh.expert_tp, expert_shares=1, rank=self.mesh.expert_tp_rank)
        count = shape[0] // self.mesh.ep
        first = self.mesh.ep_rank * count
        drawn = [self._random(shape[1:], std, layout.name, expert) for expert in range(first, first + count)]

        def fill(part: torch.Tensor, start: int) -> None:
            size = math.prod(one.local_shape(part_of_one))
            for expert, matrix in enumerate(drawn):
                low, high = max(start, expert * size), min(start + part.numel(), (expert + 1) * size)
                if low < high:
                    matrix.fill(
                        part[low - start : high - start], low - expert * size, one.boxes(part_of_one), self.dtype
                    )

        return self._add(layout, fill)

    def vector(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        value: float,
        tp_dim: int | None = None,
        on_sequence_shard: bool,
        partial_over_tp: bool = False,
        is_expert: bool = False,
        packed_heads: PackedHeads | None = None,
        valid_rows: int | None = None,
    ) -> nn.Parameter:
        """A bias or norm weight without weight decay; all entries start at ``value``, which padding needs to be 0."""
        layout = ParameterLayout(
            name=self.prefix + name,
            global_shape=shape,
            tp_dim=tp_dim,
            partial_over_tp=self._is_partial(partial_over_tp, on_sequence_shard),
            tied_over_stages=False,
            is_matrix=False,
            valid_rows=valid_rows,
            is_expert=is_expert,
            packed_heads=packed_heads,
        )
        return self._add(layout, lambda part, _start: part.fill_(value))

    def buffer(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float32 tensor of zeros that every rank holds whole; stored in checkpoints, unknown to the optimizer."""
        layout = ParameterLayout(self.prefix + name, shape, None, False, False, is_matrix=False)
        assert layout.name not in self.layouts, f"{layout.name} is built twice"
        self.layouts[layout.name] = layout
        self.buffers[layout.name] = torch.zeros(shape, dtype=torch.float32, device=self.device)
        return self.buffers[layout.name]

    def _is_partial(self, always: bool, on_sequence_shard: bool) -> bool:
        return self.mesh.tp > 1 and (always or (on_sequence_shard and self.sequence_parallel))

    def _add(self, layout: ParameterLayout, fill: Fill) -> nn.Parameter:
        assert layout.name not in self.parameters, f"{layout.name} is built twice"
        device = self.device if self.has_memory else "meta"
        # Padding stays zeros.
        parameter = nn.Parameter(torch.zeros(layout.local_shape(self.mesh), dtype=self.dtype, device=device))
        if self.draws or not layout.is_matrix:
            if self.fills is None:
                fill(parameter.detach().view(-1), 0)
            else:
                self.fills[layout.name] = fill
        self.layouts[layout.name] = layout
        self.parameters[layout.name] = parameter
        return parameter
