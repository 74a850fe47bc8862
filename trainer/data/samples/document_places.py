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

    def __init__(self, is_end: npt.NDArray[np.bool_], length: int | None = None) -> None:
        """Find them.

        Args:
            is_end: [N, S or more], whether a token ends a document; ours from now on.
            length: S, where rows hold more, as whole windows do; they are gone through at once, without a copy.
        """
        self._length = is_end.shape[1] if length is None else length
        samples, positions = ends_of_documents(is_end, self._length)
        self.cu_seqlens = np.zeros(len(samples) + 1, np.int64)
        """How many tokens of all samples come before each document, and at last how many there are, [D + 1]."""
        np.add(samples * self._length, positions, out=self.cu_seqlens[1:])
        self.bounds = document_bounds(positions, self._length)
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


def ends_of_documents(is_end: npt.NDArray[np.bool_], length: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """For each document its sample, and how many tokens of that come before its end or are its own, both [D].

    Args:
        is_end: [N, ``length`` or more]; is changed, as a sample ends its last document.
        length: tokens of a sample; what its row holds beyond does not count.
    """
    is_end[:, length:] = False
    is_end[:, length - 1] = True
    samples, positions = np.divmod(is_end.ravel().nonzero()[0], is_end.shape[1])
    positions += 1
    return samples, positions


def document_bounds(positions: npt.NDArray[np.intp], length: int) -> tuple[Bounds, ...]:
    """The bounds of each sample of ``length`` tokens, by where its documents end, [D]."""
    own = positions.tolist()
    stops = (np.flatnonzero(positions == length) + 1).tolist()
    return tuple((0, *own[first:stop]) for first, stop in zip([0, *stops], stops, strict=False))


def document_positions(cu_seqlens: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int32]:
    """The position of each token within its document, [N, S]."""
    # Where each document begins within its sample, at each of its tokens.
    positions = np.repeat((cu_seqlens[:-1] % length).astype(np.int32), np.diff(cu_seqlens)).reshape(-1, length)
    return np.subtract(np.arange(length, dtype=np.int32), positions, out=positions)
