"""Where documents lie within samples, worked out from the few places at which they end.

Legend: N samples, one after another, of S tokens; D documents. A sample ends its last document. The bounds of a sample
are 0, where its later documents begin, and S.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")
Bounds = tuple[int, ...]


class DocumentEnds:
    """Where the documents of the samples of a step end, for all its micro-batches.

    Positions, which take as much memory as the samples, are not worked out before somebody asks for them.
    """

    def __init__(self, is_end: npt.NDArray[np.bool_]) -> None:
        """``is_end``: [N, S], whether a token ends a document; ours from now on."""
        self._length = is_end.shape[1]
        self.cu_seqlens = cumulative_lengths(is_end)
        """How many tokens of all samples come before each document, and at last how many there are, [D + 1]."""
        self.bounds = document_bounds(self.cu_seqlens, self._length)
        """Of all samples."""
        self._positions: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()

    @classmethod
    def between(cls, bounds: Sequence[Bounds]) -> DocumentEnds:
        """Of samples that ``bounds`` are of."""
        is_end = np.zeros((len(bounds), bounds[0][-1]), np.bool_)
        for row, own in zip(is_end, bounds, strict=True):
            row[np.array(own[1:]) - 1] = True
        return cls(is_end)

    @property
    def positions(self) -> torch.Tensor:
        """Of each token within its document, int32 [N, S]."""
        if self._positions is None:
            self._positions = torch.from_numpy(document_positions(self.cu_seqlens, self._length))
        return self._positions

    def positions_of(self, rows: slice) -> torch.Tensor:
        """Those of ``rows``, one of the equal parts that all samples are divided into; the same tensor each time."""
        size = rows.stop - rows.start
        if not self._parts or len(self._parts[0]) != size:
            # All at once: a step has many micro-batches.
            self._parts = self.positions.view(-1, size, self._length).unbind()
        part: torch.Tensor = self._parts[rows.start // size]
        return part

    def pin(self) -> None:
        """Have the positions in memory that a GPU can read by itself."""
        if not self.positions.is_pinned():
            self._positions, self._parts = self.positions.pin_memory(), ()

    def documents(self, samples: int) -> list[Documents]:
        """Those of the micro-batches of ``samples`` samples each."""
        rows = range(0, len(self.bounds), samples)
        return [Documents.of(self, slice(first, first + samples)) for first in rows]


class Documents:
    """Where the documents of the packed samples of a micro-batch lie, so that attention stays within them."""

    __slots__ = ("_ends", "_rows", "_worked_out")

    def __init__(self, bounds: Sequence[Bounds]) -> None:
        """``bounds``: see the property."""
        self._ends = DocumentEnds.between(bounds)
        self._rows = slice(0, len(bounds))
        self._worked_out: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, ends: DocumentEnds, rows: slice) -> Documents:
        """Those of some samples of a step."""
        made = cls.__new__(cls)
        made._ends, made._rows, made._worked_out = ends, rows, {}
        return made

    @property
    def bounds(self) -> tuple[Bounds, ...]:
        """For each sample the positions at which a document begins, ascending from 0, and at the end its length."""
        return self._ends.bounds[self._rows]

    def positions(self, device: torch.device) -> torch.Tensor:
        """Of each token within its document, int32 [B, S] on ``device``."""
        found = self._ends.positions_of(self._rows)
        if found.device == device:
            return found
        return self.once(("positions", device), lambda: found.to(device, non_blocking=True))

    def pin(self) -> None:
        """Have the positions in memory that a GPU can read by itself."""
        self._ends.pin()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self.bounds == other.bounds

    __hash__ = None  # type: ignore[assignment]

    def once(self, key: Hashable, work: Callable[[], T]) -> T:
        """What ``work`` gives, which is called for the first of the layers, passes and replays that ask for ``key``."""
        if key not in self._worked_out:
            self._worked_out[key] = work()
        found: T = self._worked_out[key]
        return found


def cumulative_lengths(is_end: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """How many tokens come before each document, and how many there are, [D + 1].

    Args:
        is_end: [N, S], whether a token ends a document; is changed, as a sample ends its last one.
    """
    is_end[:, -1] = True
    ends = is_end.ravel().nonzero()[0]
    found = np.zeros(len(ends) + 1, np.int64)
    np.add(ends, 1, out=found[1:])
    return found


def document_bounds(cu_seqlens: npt.NDArray[np.int64], length: int) -> tuple[Bounds, ...]:
    """The bounds of each sample of ``length`` tokens."""
    bounds: list[Bounds] = []
    first, own = 0, [0]
    for end in cu_seqlens[1:].tolist():
        own.append(end - first)
        if end - first == length:
            bounds.append(tuple(own))
            first, own = end, [0]
    return tuple(bounds)


def document_positions(cu_seqlens: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int32]:
    """The position of each token within its document, [N, S]."""
    # Where each document begins within its sample, at each of its tokens.
    positions = np.repeat((cu_seqlens[:-1] % length).astype(np.int32), np.diff(cu_seqlens)).reshape(-1, length)
    return np.subtract(np.arange(length, dtype=np.int32), positions, out=positions)
