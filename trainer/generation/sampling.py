"""Choice of the next tokens from their logits.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.distributed.random_streams import seeded_generator
from trainer.generation.settings import GenerationSettings


def row_generators(settings: GenerationSettings, rows: Sequence[int]) -> list[torch.Generator]:
    """The random stream of each row, by its number. Empty if nothing is drawn."""
    if settings.temperature == 0:
        return []
    return [seeded_generator("cpu", "generation", settings.seed, row) for row in rows]


def choose_tokens(logits: Tensor, settings: GenerationSettings, generators: Sequence[torch.Generator]) -> Tensor:
    """One token per row, int64 [B], of logits [B, V], on their device."""
    if settings.temperature == 0:
        return logits.argmax(-1)
    shares = token_probabilities(logits.float(), settings).cpu()
    drawn = [torch.multinomial(row, 1, generator=own) for row, own in zip(shares, generators, strict=True)]
    return torch.cat(drawn).to(logits.device)


def token_probabilities(logits: Tensor, settings: GenerationSettings) -> Tensor:
    """Probabilities [B, V] of logits, float32 [B, V], at a temperature above 0."""
    logits = logits / settings.temperature
    if 0 < settings.top_k < logits.shape[-1]:
        weakest = logits.topk(settings.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, -torch.inf)
    shares = torch.softmax(logits, dim=-1)
    if settings.top_p == 1:
        return shares
    ordered, places = shares.sort(dim=-1, descending=True, stable=True)
    # A token is kept if those before it do not reach top_p, so that the most likely one always is.
    is_cut = ordered.cumsum(-1) - ordered >= settings.top_p
    kept = ordered.masked_fill(is_cut, 0.0)
    return torch.zeros_like(shares).scatter_(-1, places, kept / kept.sum(-1, keepdim=True))
