"""Work that rank 0 asks of all ranks: scores of texts, and continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainer.data.tokenizers.tokenizer import Tokenizer
from trainer.generation.model import GenerationModel
from trainer.generation.settings import GenerationSettings
from trainer.generation.text import TextRow, TextStream

Beat = Callable[[], None]


@dataclass(frozen=True)
class ModelRanks:
    """A model whose rank 0 decides what is computed next, while the other ranks follow.

    Attributes:
        model: this rank's part.
        tokenizer: the same on all ranks; finds the ends of continuations.
        beat: called before each piece of work, as a sign of life.
    """

    model: GenerationModel
    tokenizer: Tokenizer
    beat: Beat | None = None

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-likelihood of each token of each row, and True for each that is the most likely one. Rank 0 only.

        Raises:
            GenerationError: see GenerationModel.score.
        """
        return [(found.log_likelihoods, found.is_greedy) for found in self._ask("score", rows)]

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: GenerationSettings, stop: Sequence[str]
    ) -> list[list[int]]:
        """New tokens of each prompt, up to the token that completes a text of ``stop``. Rank 0 only.

        Raises:
            GenerationError: see GenerationModel.generate.
        """
        found: list[list[int]] = self._ask("generate", prompts, settings, stop)
        return found

    def release(self) -> None:
        """Let the other ranks return from ``follow``. Rank 0 only."""
        self._send(None)

    def follow(self) -> None:
        """Do what rank 0 asks, until it releases this rank. All ranks but 0."""
        while True:
            sent: list[Any] = [None]
            dist.broadcast_object_list(sent, src=0, device=self.model.device)
            if sent[0] is None:
                return
            name, arguments = sent[0]
            self._do(name, *arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._send((name, arguments))
        return self._do(name, *arguments)

    def _send(self, message: object) -> None:
        if self.model.model.mesh.world_size > 1:
            dist.broadcast_object_list([message], src=0, device=self.model.device)

    def _do(self, name: str, *arguments: Any) -> Any:
        if self.beat is not None:
            self.beat()
        return self.model.score(*arguments) if name == "score" else self._continue(*arguments)

    def _continue(
        self, prompts: Sequence[Sequence[int]], settings: GenerationSettings, stop: Sequence[str]
    ) -> list[list[int]]:
        rows = [TextRow(TextStream(self.tokenizer, prompt), stop) for prompt in prompts]
        found = self.model.generate(prompts, settings, lambda row, token: rows[row].add(token))
        return [continuation.tokens for continuation in found]
