"""Positions of documents within samples, computed from the ends of the documents.

Legend: N consecutive samples of S tokens; D documents. A sample ends its last document. The bounds of a sample are 0,
the starts of its later documents, and S.
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
    """Document ends of all samples of a step, shared by its micro-batches.

    The positions, which take as much memory as the samples, are computed on first use.
    """

    def __init__(self, is_end: npt.NDArray[np.bool_], length: int | None = None) -> None:
        """Find the document ends.

        Args:
            is_end: [N, S or more], True for a token that ends a document; modified, the caller must not use it again.
            length: S, if the rows are longer, as for whole windows, which are processed without a copy.
        """
        self._length = is_end.shape[1] if length is None else length
        samples, positions = ends_of_documents(is_end, self._length)
        self.cu_seqlens = np.zeros(len(samples) + 1, np.int64)
        """Cumulative lengths of the documents over all samples, [D + 1], from 0 to the number of tokens."""
        np.add(samples * self._length, positions, out=self.cu_seqlens[1:])
        self.bounds = document_bounds(positions, self._length)
        """Bounds of all samples."""
        self._positions: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()

    @classmethod
    def between(cls, bounds: Sequence[Bounds]) -> DocumentEnds:
        """Build from the bounds of each sample."""
        is_end = np.zeros((len(bounds), bounds[0][-1]), np.bool_)
        for row, own in zip(is_end, bounds, strict=True):
            row[np.array(own[1:]) - 1] = True
        return cls(is_end)

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token within its document, int32 [N, S]."""
        if self._positions is None:
            self._positions = torch.from_numpy(document_positions(self.cu_seqlens, self._length))
        return self._positions

    def positions_of(self, rows: slice) -> torch.Tensor:
        """Positions of ``rows``, one of equal parts of the samples.

        Every call returns the same tensor.
        """
        size = rows.stop - rows.start
        if not self._parts or len(self._parts[0]) != size:
            # Divide once: a step has many micro-batches.
            self._parts = self.positions.view(-1, size, self._length).unbind()
        part: torch.Tensor = self._parts[rows.start // size]
        return part

    def pin(self) -> None:
        """Move the positions to pinned memory."""
        if not self.positions.is_pinned():
            self._positions, self._parts = self.positions.pin_memory(), ()

    def documents(self, samples: int) -> list[Documents]:
        """Documents of each micro-batch of ``samples`` samples."""
        rows = range(0, len(self.bounds), samples)
        return [Documents.of(self, slice(first, first + samples)) for first in rows]


class Documents:
    """Document bounds of the samples of a micro-batch, to which attention is restricted."""

    __slots__ = ("_ends", "_rows", "_worked_out")

    def __init__(self, bounds: Sequence[Bounds]) -> None:
        """Build from the bounds of each sample; see the property ``bounds``."""
        self._ends = DocumentEnds.between(bounds)
        self._rows = slice(0, len(bounds))
        self._worked_out: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, ends: DocumentEnds, rows: slice) -> Documents:
        """Build from the samples ``rows`` of a step."""
        made = cls.__new__(cls)
        made._ends, made._rows, made._worked_out = ends, rows, {}
        return made

    @property
    def bounds(self) -> tuple[Bounds, ...]:
        """Document starts of each sample, ascending from 0, and the sample's length."""
        return self._ends.bounds[self._rows]

    def positions(self, device: torch.device) -> torch.Tensor:
        """Position of each token within its document, int32 [B, S] on ``device``."""
        found = self._ends.positions_of(self._rows)
        if found.device == device:
            return found
        return self.once(("positions", device), lambda: found.to(device, non_blocking=True))

    def pin(self) -> None:
        """Move the positions to pinned memory."""
        self._ends.pin()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self.bounds == other.bounds

    __hash__ = None  # type: ignore[assignment]

    def once(self, key: Hashable, work: Callable[[], T]) -> T:
        """Result of ``work`` for ``key``, computed once for all layers, passes and replays."""
        if key not in self._worked_out:
            self._worked_out[key] = work()
        found: T = self._worked_out[key]
        return found


def ends_of_documents(is_end: npt.NDArray[np.bool_], length: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Sample of each document and the document's end within the sample (exclusive), both [D].

    Args:
        is_end: [N, ``length`` or more]; modified, because a sample ends its last document.
        length: tokens of a sample; the rest of a row is ignored.
    """
    is_end[:, length:] = False
    is_end[:, length - 1] = True
    samples, positions = np.divmod(is_end.ravel().nonzero()[0], is_end.shape[1])
    positions += 1
    return samples, positions


def document_bounds(positions: npt.NDArray[np.intp], length: int) -> tuple[Bounds, ...]:
    """Bounds of each sample, from the documents' ends within their samples, [D]."""
    own = positions.tolist()
    stops = (np.flatnonzero(positions == length) + 1).tolist()
    return tuple((0, *own[first:stop]) for first, stop in zip([0, *stops], stops, strict=False))


def document_positions(cu_seqlens: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int32]:
    """Position of each token within its document, [N, S]."""
    # First the start of each token's document within its sample.
    positions = np.repeat((cu_seqlens[:-1] % length).astype(np.int32), np.diff(cu_seqlens)).reshape(-1, length)
    return np.subtract(np.arange(length, dtype=np.int32), positions, out=positions)
