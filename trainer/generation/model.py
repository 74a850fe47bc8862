"""GenerationModel: a trained model in any layout that generates tokens and scores texts.

Legend: B rows, S positions of the longest row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.generation.errors import GenerationError
from trainer.generation.sampling import choose_tokens, row_generators
from trainer.model.cache import KeyValueCache
from trainer.pipeline.executor import forward_logits, forward_next
from trainer.planning.rope import RopeScaling

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.generation.settings import GenerationSettings
    from trainer.parallel_model import ParallelModel

Observer = Callable[[int, int], bool]
"""Takes the number of a prompt and its new token; returns True if the row ends with this token."""

MOST_TOKENS_AT_ONCE = 4096
"""Limits the memory of the logits: 4096 tokens of a vocabulary of 128,000 are 1 GB in 16 bits."""


@dataclass(frozen=True)
class Continuation:
    """New tokens of one prompt.

    Attributes:
        tokens: without the stop token.
        ending: ``stop``: a stop token, or the observer; ``length``: max_new_tokens; ``positions``: the model has no
            more positions.
    """

    tokens: list[int]
    ending: Literal["stop", "length", "positions"]


@dataclass(frozen=True)
class TokenScores:
    """Scores of a row's tokens, each given those before it; the first token has none.

    Attributes:
        log_likelihoods: natural logarithms, float32 [length - 1], on the CPU.
        is_greedy: True for a token that is the most likely one, bool [length - 1], on the CPU.
    """

    log_likelihoods: Tensor
    is_greedy: Tensor


@dataclass(frozen=True)
class GenerationModel:
    """This rank's part of a trained model, without gradients. Its methods are collective: all ranks of the job.

    Attributes:
        model: on ``device``.
        config: of the run that wrote the checkpoint, except for the layout and the choice of attention kernels.
        vocab_size: number of token ids, without padding.
        checkpoint: folder of the checkpoint, or a Hugging Face folder.
        iteration: training iterations that the model has seen.
        device: device of the parameters.
        notes: values of the config that are taken as others, and ops without the best kernels, one line each.
    """

    model: ParallelModel
    config: TrainConfig
    vocab_size: int
    checkpoint: Path
    iteration: int
    device: torch.device
    notes: tuple[str, ...] = ()

    @property
    def most_positions(self) -> int:
        """Longest row, in tokens."""
        return most_positions(self.config)

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Logits [B, S, V] of tokens int64 [B, S], in the model's dtype, on the last stage's ranks; else None.

        A shorter row may have any tokens behind its end: attention is causal.

        Raises:
            GenerationError: the rows are longer than the model's positions.
        """
        check_rows(tokens.tolist(), self.vocab_size, self.most_positions)
        return forward_logits(self.model, tokens.to(self.device))

    def score(self, rows: Sequence[Sequence[int]]) -> list[TokenScores]:
        """Log-likelihoods of the tokens of ``rows``, in their order and the same on all ranks.

        Raises:
            GenerationError: a row is empty, has more than one token more than the model has positions, or has a token
                outside the vocabulary.
        """
        # The last token of a row is scored, but needs no position.
        check_rows(rows, self.vocab_size, self.most_positions + 1)
        found: dict[int, TokenScores] = {}
        for numbers in _by_length(rows):
            found |= zip(numbers, self._score_batch([rows[number] for number in numbers]), strict=True)
        return [found[number] for number in range(len(rows))]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        observe: Observer | None = None,
        *,
        batch_size: int = 16,
    ) -> list[Continuation]:
        """Continue each of ``prompts``; the result is the same on all ranks, and for every batch size.

        One rank chooses the tokens and sends them to the others.

        Args:
            prompts: tokens, at least one each.
            settings: the same on all ranks.
            observe: called on every rank for each new token, in order; must return the same on all ranks. The rows of
                one batch take turns.
            batch_size: prompts that are continued at the same time.

        Raises:
            GenerationError: a prompt is empty, leaves no room in the model's positions, or has a token outside the
                vocabulary.
        """
        return list(self.generate_each(prompts, settings, observe, batch_size=batch_size))

    def generate_each(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        observe: Observer | None = None,
        *,
        batch_size: int = 16,
    ) -> Iterator[Continuation]:
        """As ``generate``, but yields each batch's results at its end. All ranks must take all of them."""
        check_rows(prompts, self.vocab_size, self.most_positions, more=min(settings.max_new_tokens, 1))
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            yield from _Rows(self, batch, settings, first, observe or _observe_nothing).run()

    def from_last_stage(self, values: Tensor) -> Tensor:
        """``values`` of the first rank with the LM head, on every rank. All ranks must pass the same shape."""
        if self.model.mesh.world_size > 1:
            dist.broadcast(values, src=self._source)
        return values

    @property
    def is_source(self) -> bool:
        """True on the rank whose tokens all ranks take."""
        return self.model.mesh.rank == self._source

    @property
    def _source(self) -> int:
        mesh = self.model.mesh.at(0)
        return mesh.pp_ranks[mesh.loss_pp_rank]

    def _score_batch(self, rows: Sequence[Sequence[int]]) -> list[TokenScores]:
        tokens = padded(rows).to(self.device)
        logits = forward_logits(self.model, tokens[:, : max(1, tokens.shape[1] - 1)])
        found = torch.zeros(2, len(rows), tokens.shape[1], dtype=torch.float32, device=self.device)
        for row, (own, text) in enumerate(zip(logits, rows, strict=True)) if logits is not None else ():
            length = len(text) - 1
            scores, labels = own[:length].float(), tokens[row, 1 : len(text)]
            chosen = scores.gather(-1, labels[:, None])[:, 0]
            found[0, row, :length] = chosen - scores.logsumexp(-1)
            found[1, row, :length] = scores.argmax(-1) == labels
        values, greedy = self.from_last_stage(found).cpu()
        return [
            TokenScores(values[row, : len(text) - 1], greedy[row, : len(text) - 1].bool())
            for row, text in enumerate(rows)
        ]


def most_positions(config: TrainConfig) -> int:
    """Tokens of the longest row; with longrope the most that take the short factors.

    One token more would change the angles of all tokens before it, whose keys are kept.
    """
    scaling, longest = RopeScaling.of(config.model), config.max_position_embeddings
    return min(longest, int(scaling.original_max_position_embeddings)) if scaling.rope_type == "longrope" else longest


def check_rows(rows: Sequence[Sequence[int]], vocab_size: int, longest: int, *, more: int = 0) -> None:
    """Check that a model can take each row, and ``more`` tokens after it.

    Raises:
        GenerationError: a row is empty, too long, or has a token outside the vocabulary.
    """
    for number, row in enumerate(rows):
        if not row:
            raise GenerationError(f"text {number + 1}: is empty; give at least one token")
        wrong = next((token for token in row if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise GenerationError(
                f"text {number + 1}: holds token {wrong}, but the model's vocabulary has {vocab_size} tokens; use the "
                "tokenizer of its training"
            )
        if len(row) + more > longest:
            raise GenerationError(
                f"text {number + 1}: has {len(row)} tokens, but rows of this model end at {longest} tokens; shorten it "
                f"to {longest - more} tokens"
            )


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows as int64 [B, S], with zeros behind the shorter ones."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    return tokens


def _by_length(rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Numbers of rows of similar length, with at most MOST_TOKENS_AT_ONCE tokens including padding."""
    batch: list[int] = []
    for number in sorted(range(len(rows)), key=lambda number: -len(rows[number])):
        if batch and (len(batch) + 1) * len(rows[batch[0]]) > MOST_TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _observe_nothing(row: int, token: int) -> bool:
    del row, token
    return False


class _Rows:
    """Prompts that are continued together."""

    def __init__(
        self,
        model: GenerationModel,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        first: int,
        observe: Observer,
    ) -> None:
        self._model, self._prompts, self._settings = model, prompts, settings
        self._first, self._observe = first, observe
        self._new: list[list[int]] = [[] for _ in prompts]
        self._endings: list[Literal["stop", "length", "positions"] | None] = [None for _ in prompts]

    def run(self) -> list[Continuation]:
        """Generate until all rows have ended."""
        model, settings = self._model, self._settings
        lengths = [len(prompt) for prompt in self._prompts]
        capacity = min(max(lengths) + settings.max_new_tokens, model.most_positions)
        cache = KeyValueCache(lengths, capacity, model.device)
        numbers = range(self._first, self._first + len(lengths))
        generators = row_generators(settings, numbers) if model.is_source else []
        tokens = padded(self._prompts).to(model.device)
        self._end_full_rows()
        while None in self._endings:
            logits = forward_next(model.model, tokens, cache)
            if logits is not None and model.is_source:
                chosen = choose_tokens(logits, settings, generators)
            else:
                chosen = torch.empty(len(lengths), dtype=torch.int64, device=model.device)
            chosen = model.from_last_stage(chosen)
            self._take(chosen.tolist())
            tokens = chosen[:, None]
        return [Continuation(new, ending or "length") for new, ending in zip(self._new, self._endings, strict=True)]

    def _take(self, chosen: list[int]) -> None:
        for row, token in enumerate(chosen):
            if self._endings[row] is not None:
                continue
            if token in self._settings.stop_tokens:
                self._endings[row] = "stop"
                continue
            self._new[row].append(token)
            if self._observe(self._first + row, token):
                self._endings[row] = "stop"
        self._end_full_rows()

    def _end_full_rows(self) -> None:
        for row, (prompt, new) in enumerate(zip(self._prompts, self._new, strict=True)):
            if self._endings[row] is not None:
                continue
            if len(new) >= self._settings.max_new_tokens:
                self._endings[row] = "length"
            elif len(prompt) + len(new) >= self._model.most_positions:
                self._endings[row] = "positions"
