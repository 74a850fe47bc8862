"""PublishedModel: files of a published model opened as one of our models. Reads single tensors."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.families.catalogue import family_of_config, prediction_tensors, published_model, read_model, text_part
from trainer.families.format.family import Family, Weight, weight
from trainer.families.format.forms import ByExpert, ExpertMatrices
from trainer.hub.errors import HubError
from trainer.hub.layouts import to_ours
from trainer.hub.quantized import StoredAs
from trainer.hub.tensor_file import DTYPES

_PREDICTION_COUNTS = frozenset(["num_nextn_predict_layers", "num_mtp_layers"])
"""Names of the number of prediction layers, which a file without them does not count, whatever absence means."""


class Piece(NamedTuple):
    """A part of one of our tensors that can be read alone.

    Attributes:
        offset: first index in each dim of our tensor.
        shape: extent in each dim.
        theirs: names of the Hugging Face tensors that it is made of.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    theirs: tuple[str, ...]


class PublishedModel(ExitStack):
    """Open files. Every tensor of the model is there, with the right shape, and no other.

    Prediction layers (multi-token prediction) of which the files have no tensor are not part of the model, although
    the keys may count them: transformers saves such folders. ``notes`` says so.
    """

    def __init__(
        self,
        path: Path,
        keys: dict[str, Any],
        where: str,
        *,
        may_lack_heads: bool = False,
        drops_prediction_layers: bool = False,
    ):
        """Read the headers and check them against the keys.

        Args:
            path: folder or file.
            keys: content of config.json, or its equivalent.
            where: name of the place of the keys, for messages.
            may_lack_heads: accept files of the bare encoder, whose heads are then no tensors of the model.
            drops_prediction_layers: leave out the prediction layers, which no logit needs.

        Raises:
            HubError: a file is missing or damaged, or a tensor is missing, left over, or has a wrong shape or dtype.
            FamilyError: the keys are of an unknown family, or one of them has no known meaning.
        """
        super().__init__()
        self.path = path
        self.wrapped_in, keys = text_part(keys, where)
        """The family, if the files hold its model beside other parts."""
        self.where = where
        self.keys = keys
        # Before the files: an unknown family is told first.
        self.family = family_of_config(keys, where)
        self._stored = self.read_headers()
        self.family, self.keys, self.model = published_model(keys, where, lambda: self._stored)
        counted = read_model(self.keys, where)[1]
        further = prediction_tensors(counted, self._stored)
        if drops_prediction_layers:
            self._stored = {name: stored for name, stored in self._stored.items() if name not in further}
            self.model = self.model.model_copy(update={"mtp_num_layers": 0})
        counts = not _PREDICTION_COUNTS.isdisjoint(keys)
        self._num_counted_only = counted.mtp_num_layers if counts and not further else 0
        self.num_dropped = len(further) if drops_prediction_layers else 0
        """Number of tensors of prediction layers that are left out."""
        rules = list(self.family.weights(self.model))
        self.absent = _absent_heads(self.family, rules, self._stored, path, may_lack_heads)
        """Our global names of the heads that the files lack."""
        rules = [rule for rule in rules if rule.ours not in self.absent]
        named = {name for rule in rules for name in rule.theirs}
        tables = (weight("embedding.word.weight", name) for name in self.family.word_table_copies if name not in named)
        copies = [*self.family.copies(self.model), *tables]
        self._names = _hub_names(self.family, rules, copies, self._stored, path)
        self.weights: dict[str, Weight] = {rule.ours: rule for rule in rules}
        """Rules by our global names, in the order of the model."""
        self._copies = [
            (name, original)
            for rule in copies
            for name, original in zip(rule.theirs, self.weights[rule.ours].theirs, strict=True)
            if name in self._names
        ]
        self._check_shapes()

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """The files that the model is read from."""

    @property
    @abstractmethod
    def side_files(self) -> Collection[str]:
        """Names of the files beside the weights."""

    @property
    def notes(self) -> list[str]:
        """One sentence on each thing of the published model that is not read."""
        found = [f"{self.where}: {note}" for note in self.family.notes(self.keys)]
        found += [
            f"{self.path}: holds no {name}, and transformers takes {other} in its place; here it begins with these "
            "values and is trained apart, and an export has both"
            for name, other in self.family.taken_for.items()
            if self._names.get(name) == other
        ]
        if self._num_counted_only:
            found.append(
                f"{self.where}: counts {self._num_counted_only} prediction layers (MTP), but the files hold no tensor "
                "of them; the model is read without them"
            )
        return found

    @abstractmethod
    def write_side_files(self, target: Path) -> None:
        """Write config.json, tokenizer and what else belongs beside the weights.

        Raises:
            OSError: a file cannot be read or written.
        """

    @abstractmethod
    def read_headers(self) -> dict[str, StoredAs]:
        """Header entries of all tensors in the files, by Hugging Face's names.

        Raises:
            HubError: a file is missing or damaged.
        """

    @abstractmethod
    def read_stored(self, name: str, expert: int | None) -> Tensor:
        """The tensor ``name`` of the files, or with ``expert`` this index of its first dim, which stays with size 1.

        Raises:
            HubError: the file cannot be read.
        """

    @abstractmethod
    def release(self) -> None:
        """Unmap the files, which the next read maps again.

        Pages that were read count as memory of the process until then, although the system can drop them.
        """

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary tables."""
        assert self.model.vocab_size is not None
        return self.model.vocab_size

    @property
    def num_tensors(self) -> int:
        """Number of Hugging Face tensors that the model is made of."""
        return len(self._names)

    @property
    def stored(self) -> Mapping[str, StoredAs]:
        """Header entries of the tensors that the model is made of, by their names in the files."""
        return {name: self._stored[name] for name in self._names.values()}

    @property
    def weight_files(self) -> list[Path]:
        """The files that hold these tensors."""
        return sorted({self.path / stored.file for stored in self.stored.values()})

    def dtype(self, ours: str) -> torch.dtype:
        """Dtype of one of our tensors."""
        return DTYPES[self._of(self.weights[ours].theirs[0]).dtype]

    def shape(self, ours: str) -> tuple[int, ...]:
        """Shape of one of our tensors."""
        rule = self.weights[ours]
        return tuple(to_ours(rule.form, [self._meta(name) for name in rule.theirs]).shape)

    def pieces(self, ours: str) -> Iterator[Piece]:
        """The parts of one of our tensors, each small enough to be read alone: one expert, or the whole tensor."""
        rule, shape = self.weights[ours], self.shape(ours)
        if not isinstance(rule.form, (ByExpert, ExpertMatrices)):
            yield Piece((0,) * len(shape), shape, rule.theirs)
            return
        size = len(rule.theirs) // rule.form.count if isinstance(rule.form, ByExpert) else 0
        for expert in range(shape[0]):
            theirs = rule.theirs[expert * size : (expert + 1) * size] if size else rule.theirs
            yield Piece((expert, *(0 for _ in shape[1:])), (1, *shape[1:]), theirs)

    def read(self, ours: str, piece: Piece) -> Tensor:
        """The elements of a piece, in mapped or new memory.

        Raises:
            HubError: the file cannot be read.
        """
        form = self.weights[ours].form
        if isinstance(form, ExpertMatrices):
            return to_ours(form, [self.read_theirs(name, expert=piece.offset[0]) for name in piece.theirs])
        tensors = [self.read_theirs(name) for name in piece.theirs]
        if isinstance(form, ByExpert):
            return to_ours(form.each, tensors).unsqueeze(0)
        return to_ours(form, tensors)

    def read_theirs(self, name: str, expert: int | None = None) -> Tensor:
        """One Hugging Face tensor, in mapped memory; in new memory if it is quantized.

        Args:
            name: of the tensor.
            expert: read only this index of the first dim, which stays with size 1; None for all.

        Raises:
            HubError: the file cannot be read, or an element is not finite.
        """
        stored, found = self._of(name), self._names[name]
        if stored.packed is None:
            tensor = self.read_stored(found, expert)
        else:
            tensor = stored.packed.unpack(lambda part: self.read_stored(part, expert))
        # aminmax passes NaN on, and needs no memory.
        if tensor.numel() and not all(math.isfinite(float(bound)) for bound in tensor.aminmax()):
            raise HubError(
                f"{self.path / stored.file}: {name} holds NaN or infinite elements, so that no logit would be a "
                "number; take another copy of the model"
            )
        return tensor

    def check_copies(self) -> None:
        """Check that tensors which repeat another one have its bits. Reads both.

        Raises:
            HubError: names both tensors, or a file cannot be read.
        """
        for name, original in self._copies:
            one, other = self.read_theirs(name), self.read_theirs(original)
            if one.dtype != other.dtype or not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                raise HubError(
                    f"{self.path / self._of(name).file}: {name} differs from {original}, although both are one table "
                    "of the model; the files are damaged, or of a model that is not supported"
                )

    def _of(self, name: str) -> StoredAs:
        return self._stored[self._names[name]]

    def _meta(self, name: str) -> Tensor:
        return torch.empty(self._of(name).shape, device="meta")

    def _check_shapes(self) -> None:
        for rule in self.weights.values():
            for name in rule.theirs:
                if self._of(name).dtype not in DTYPES:
                    raise HubError(
                        f"{self.path / self._of(name).file}: {name} has dtype {self._of(name).dtype}; weights can be "
                        + ", ".join(DTYPES)
                    )
            dtypes = {self._of(name).dtype for name in rule.theirs}
            if len(dtypes) > 1:
                raise HubError(
                    f"{self.path}: {', '.join(rule.theirs)} have different dtypes, {', '.join(sorted(dtypes))}"
                )
            try:
                self.shape(rule.ours)
            except (RuntimeError, ValueError) as error:
                shapes = ", ".join(f"{name} {list(self._of(name).shape)}" for name in rule.theirs)
                raise HubError(f"{self.where}: does not fit the shapes of {shapes}: {error}") from None


def _absent_heads(
    family: Family, rules: Sequence[Weight], stored: Mapping[str, StoredAs], path: Path, may_lack_heads: bool
) -> frozenset[str]:
    """Our names of the heads of which the files hold no tensor at all."""
    has_prefix = _has_prefix(family, stored)
    absent: list[Weight] = []
    for pattern in family.heads:
        head = [rule for rule in rules if re.fullmatch(pattern, rule.theirs[0])]
        names = {_name_in_files(family, name, has_prefix) for rule in head for name in rule.theirs}
        absent += [] if names & stored.keys() else head
    if absent and not may_lack_heads:
        raise HubError(
            f"{path}: holds the bare {family.name}, without {absent[0].theirs[0]} of its heads; to train it "
            "with new heads, set checkpoint.load to this folder and checkpoint.draw_missing_heads to true"
        )
    return frozenset(rule.ours for rule in absent)


def _has_prefix(family: Family, stored: Mapping[str, StoredAs]) -> bool:
    return any(name.startswith(family.base_prefix) for name in stored)


def _name_in_files(family: Family, name: str, has_prefix: bool) -> str:
    return name if has_prefix else name.removeprefix(family.base_prefix)


def _hub_names(
    family: Family, rules: Sequence[Weight], copies: Sequence[Weight], stored: Mapping[str, StoredAs], path: Path
) -> dict[str, str]:
    """Rule's name -> name in the files, which may lack the name of the base model, or have it in addition."""
    has_prefix = _has_prefix(family, stored)
    wanted = [name for rule in rules for name in rule.theirs]
    names = {name: _name_in_files(family, name, has_prefix) for name in wanted}
    names |= {name: other for name, other in family.taken_for.items() if name in names and name not in stored}
    missing = next((name for name, found in names.items() if found not in stored), None)
    if missing is not None:
        raise HubError(f"{path}: has no tensor {names[missing]}, which a {family.name} of this shape has")
    repeated = {name: _name_in_files(family, name, has_prefix) for rule in copies for name in rule.theirs}
    names |= {name: found for name, found in repeated.items() if found in stored}
    used = set(names.values())
    surplus = [name for name in stored if name not in used and not _is_ignored(family, name)]
    for pattern, words in family.refused_tensors.items():
        refused = next((name for name in surplus if re.fullmatch(pattern, name)), None)
        if refused is not None:
            raise HubError(f"{path}: holds the tensor {refused}, {words}")
    if surplus:
        raise HubError(f"{path}: holds the tensor {surplus[0]}, which a {family.name} of this shape does not have")
    return names


def _is_ignored(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in family.ignored_tensors)
