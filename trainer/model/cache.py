"""Keys and values of the tokens that a model has seen, so that generation computes each token once.

Legend: B rows, S positions of a pass, G key and value heads of this rank, D width of a key head, V of a value head.
Shazeer 2019 (arXiv:1911.02150), section 2.4, for incremental generation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KeyValueCache:
    """Keys and values of this rank's layers for B rows of unequal lengths.

    The first pass takes the prompts, each from column 0 on, with padding behind the shorter ones: attention is causal,
    so that no token sees it. Every further pass takes one token per row, which overwrites the row's first padding. So
    a row's results do not depend on the other rows.
    """

    def __init__(self, lengths: Sequence[int], capacity: int, device: torch.device):
        """Begin with empty rows. No communication; a layer's memory is allocated by its first pass.

        Args:
            lengths: tokens of each row's prompt, at least 1.
            capacity: positions of the longest row at the end.
            device: device of the layers.
        """
        self._capacity = capacity
        self._longest = max(lengths)
        self._is_even = min(lengths) == self._longest
        self._next = torch.tensor(lengths, device=device)  # [B], of the next pass
        self._rows = torch.arange(len(lengths), device=device)
        self._passes = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._masks: dict[int | None, torch.Tensor] = {}

    @property
    def is_first_pass(self) -> bool:
        """True during the pass of the prompts."""
        return self._passes == 0

    @property
    def positions(self) -> torch.Tensor | None:
        """Position of each row's token, int64 [B, 1], or [1, 1] if all rows have the same; None in the first pass."""
        if self.is_first_pass:
            return None
        return self._next[:1, None] if self._is_even else self._next[:, None]

    def advance(self) -> None:
        """End the pass: the next one takes one more token of each row."""
        if self._passes:
            # A row that has ended before the longest one may already fill its memory.
            self._next = (self._next + 1).clamp_(max=self._capacity - 1)
            self._longest = min(self._longest + 1, self._capacity - 1)
        self._passes += 1
        self._masks = {}

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last token of each row, [1, B, H] of [S, B, H]."""
        if not self.is_first_pass:
            return hidden
        return hidden[self._next - 1, self._rows].unsqueeze(0)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add a pass's keys [B, G, S, D] and values [B, G, S, V] of a layer."""
        if layer not in self._layers:
            # Zeros, because a hidden column still counts with a share of 0: memory may hold NaN.
            self._layers[layer] = tuple(  # type: ignore[assignment]
                part.new_zeros((*part.shape[:2], self._capacity, part.shape[3])) for part in (key, value)
            )
        for stored, part in zip(self._layers[layer], (key, value), strict=True):
            if self.is_first_pass:
                stored[:, :, : part.shape[2]] = part
            elif self._is_even:
                stored[:, :, self._longest] = part[:, :, 0]
            else:
                stored[self._rows, :, self._next] = part[:, :, 0]

    def visible(self, layer: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys [B, G, K, D] and values [B, G, K, V] that the tokens of this pass may see, and a mask [B, K].

        The mask is True where a row's token sees a key; None: everywhere. ``window``: positions that a token sees, its
        own included.
        """
        first = 0
        if self._is_even and window is not None:
            first = max(0, self._longest + 1 - window)
        key, value = (stored[:, :, first : self._longest + 1] for stored in self._layers[layer])
        return key, value, None if self._is_even else self._mask(window)

    def _mask(self, window: int | None) -> torch.Tensor:
        if window not in self._masks:
            columns = torch.arange(self._longest + 1, device=self._next.device)
            own = self._next[:, None]
            seen = columns <= own
            self._masks[window] = seen if window is None else seen & (columns > own - window)
        return self._masks[window]
