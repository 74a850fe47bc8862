"""What a step makes of its windows of tokens: tokens, labels, and where documents end.

Legend: N windows of S + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.document_places import DocumentEnds, MarkedEnds
from trainer.data.windows import Tokens


class EndRules(NamedTuple):
    """What is asked for about the documents of samples, of which each ends with the same token."""

    end: int
    with_counts: bool
    """Which labels count: those of all tokens but ``end``."""
    with_ends: bool
    """Where documents end."""

    def places_of(self, tokens: Tokens) -> tuple[npt.NDArray[np.bool_] | None, DocumentEnds | None]:
        """Of ``tokens`` [N, S] whether the label of each counts, [N, S], and where documents end, as far as asked."""
        is_end = tokens == self.end
        counts = ~is_end if self.with_counts else None
        return counts, MarkedEnds(is_end) if self.with_ends else None


class WindowParts(NamedTuple):
    """What windows become."""

    tokens: torch.Tensor
    """int64 [N, S]."""
    labels: torch.Tensor
    """int64 [N, S]."""
    counts: torch.Tensor | None = None
    """bool [N, S], whether a label counts in the loss; None: not asked for."""
    ends: DocumentEnds | None = None
    """None: not asked for."""


WindowDivider = Callable[[Tokens, "EndRules | None"], WindowParts]
"""divide_windows, or what gives the same parts."""


def divide_windows(windows: Tokens, rules: EndRules | None) -> WindowParts:
    """The parts of ``windows`` [N, S + 1]; without rules nothing about documents."""
    tokens = windows[:, :-1]
    counts, ends = (None, None) if rules is None else rules.places_of(tokens)
    inputs, labels = (torch.from_numpy(part.astype(np.int64)) for part in (tokens, windows[:, 1:]))
    return WindowParts(inputs, labels, None if counts is None else torch.from_numpy(counts), ends)
