"""Forms: how one of our tensors is laid out as Hugging Face tensors. Torch-free; trainer.hub.layouts computes them.

Every form is a permutation of elements: it loses nothing, and maps gradients as it maps weights.
Legend: E experts, F feed-forward width, G query groups, R queries per group, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plain:
    """The same tensor."""


@dataclass(frozen=True)
class Transposed:
    """A matrix stored as [in, out]; vectors are the same. (GPT-2's Conv1D.)"""


@dataclass(frozen=True)
class SeparateHeads:
    """Three tensors, queries [G R D, ...], keys and values [G D, ...].

    Ours has for each group its queries, then its key, then its value.
    """

    groups: int
    queries_per_group: int
    head_dim: int


@dataclass(frozen=True)
class JoinedHeads(SeparateHeads):
    """One tensor with queries, keys and values.

    Attributes:
        by_head: each head's query, key and value are neighbours (GPT-NeoX); else all queries come first.
        transposed: a matrix is stored as [in, out] (GPT-2).
    """

    by_head: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Stacked:
    """Two tensors, gate and up, each [F, ...]; ours is [2, F, ...]."""


@dataclass(frozen=True)
class Joined:
    """One tensor [2 F, ...], gates first; ours is [2, F, ...]. (Phi-3.)"""


@dataclass(frozen=True)
class ByExpert:
    """The tensors of each expert in turn, each expert's in the form ``each``; ours is [E, ...]."""

    count: int
    each: Plain | Stacked


@dataclass(frozen=True)
class ExpertMatrices:
    """One tensor of all experts, a matrix stored as [E, in, out], gates and ups alternating if ``gated``. (gpt-oss.)"""

    gated: bool


Form = Plain | Transposed | SeparateHeads | JoinedHeads | Stacked | Joined | ByExpert | ExpertMatrices
