"""Conversion of tensors between our layout and Hugging Face's, by the forms of trainer.families.format.forms.

Legend: E experts, F feed-forward width, G query groups, R queries per group, D head width.
Each function is a permutation of elements, so that ``to_theirs(form, to_ours(form, tensors))`` has the same bits, and
gradients convert as weights do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.families.format.forms import (
    ByExpert,
    ExpertMatrices,
    Form,
    Joined,
    JoinedHeads,
    Plain,
    SeparateHeads,
    Stacked,
    Transposed,
)


def to_ours(form: Form, theirs: Sequence[Tensor]) -> Tensor:
    """Our tensor, made of Hugging Face tensors in the order of the Weight; a new tensor or a view.

    Raises:
        RuntimeError: shapes do not fit the form.
    """
    if isinstance(form, ByExpert):
        size = len(theirs) // form.count
        return torch.stack([to_ours(form.each, theirs[n * size : (n + 1) * size]) for n in range(form.count)])
    if isinstance(form, Stacked):
        return torch.stack(tuple(theirs))
    if isinstance(form, JoinedHeads):
        return _packed(form, *_split_heads(form, theirs[0]))
    if isinstance(form, SeparateHeads):
        return _packed(form, *theirs)
    [tensor] = theirs
    if isinstance(form, Transposed):
        return tensor.t()
    if isinstance(form, Joined):
        return tensor.view(2, -1, *tensor.shape[1:])
    if isinstance(form, ExpertMatrices):
        if tensor.dim() == 3:
            tensor = tensor.transpose(1, 2)  # [E, out, in]
        return tensor.reshape(len(tensor), -1, 2, *tensor.shape[2:]).transpose(1, 2) if form.gated else tensor
    return tensor


def to_theirs(form: Form, ours: Tensor) -> tuple[Tensor, ...]:
    """The Hugging Face tensors of one of ours: the inverse of ``to_ours``."""
    if isinstance(form, ByExpert):
        return tuple(tensor for expert in ours for tensor in to_theirs(form.each, expert))
    if isinstance(form, Stacked):
        return (ours[0], ours[1])
    if isinstance(form, JoinedHeads):
        return (_join_heads(form, *_unpacked(form, ours)),)
    if isinstance(form, SeparateHeads):
        return _unpacked(form, ours)
    if isinstance(form, Transposed):
        return (ours.t(),)
    if isinstance(form, Joined):
        return (ours.flatten(0, 1),)
    if isinstance(form, ExpertMatrices):
        if form.gated:
            ours = ours.transpose(1, 2).flatten(1, 2)
        return (ours.transpose(1, 2) if ours.dim() == 3 else ours,)
    assert isinstance(form, Plain)
    return (ours,)


def _packed(form: SeparateHeads, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rest, groups, width = query.shape[1:], form.groups, form.head_dim
    parts = (
        query.reshape(groups, form.queries_per_group * width, *rest),
        *(t.reshape(groups, width, *rest) for t in (key, value)),
    )
    return torch.cat(parts, dim=1).flatten(0, 1)


def _unpacked(form: SeparateHeads, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width = form.head_dim
    grouped = packed.view(form.groups, -1, *packed.shape[1:])
    query, key, value = torch.split(grouped, [form.queries_per_group * width, width, width], dim=1)
    return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)


def _split_heads(form: JoinedHeads, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if form.transposed:
        tensor = tensor.t()
    if form.by_head:
        heads = tensor.view(form.groups, 3, form.head_dim, *tensor.shape[1:])
        return heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1), heads[:, 2].flatten(0, 1)
    keys = form.groups * form.head_dim
    query, key, value = torch.split(tensor, [keys * form.queries_per_group, keys, keys])
    return query, key, value


def _join_heads(form: JoinedHeads, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if form.by_head:
        heads = [part.view(form.groups, form.head_dim, *part.shape[1:]) for part in (query, key, value)]
        joined = torch.stack(heads, dim=1).flatten(0, 2)
    else:
        joined = torch.cat((query, key, value))
    return joined.t() if form.transposed else joined


def theirs_shapes(form: Form, ours: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the Hugging Face tensors of one of ours, without computing."""
    return tuple(tuple(tensor.shape) for tensor in to_theirs(form, torch.empty(tuple(ours), device="meta")))


def elements(shapes: Sequence[Sequence[int]]) -> int:
    """Number of elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)
