"""Tasks of lm-evaluation-harness, evaluated on the model that is being trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.errors import ConfigError
from trainer.data.tokenizers.settings import settings_of
from trainer.evaluation.encoding import Encoding
from trainer.evaluation.errors import EvaluationError
from trainer.evaluation.ranks import ModelRanks
from trainer.evaluation.task_list import continues_text, load_tasks
from trainer.generation.model import GenerationModel

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from trainer.config.train_config import TrainConfig
    from trainer.parallel_model import ParallelModel


_KEY = "evaluation.tasks"


@dataclass(frozen=True)
class TaskEvaluation:
    """The tasks of a run.

    Attributes:
        config: of the run.
        encoding: its tokenizer.
        tasks: the loaded tasks on rank 0; None on all others, which follow.
        vocab_size: number of token ids, without padding.
    """

    config: TrainConfig
    encoding: Encoding
    tasks: Any
    vocab_size: int

    @classmethod
    def open(cls, config: TrainConfig, vocab_size: int, rank: int) -> TaskEvaluation | None:
        """Read the tokenizer and, on rank 0, load the tasks; None if the config has none. No communication.

        Raises:
            ConfigError: a task cannot be loaded, or not be evaluated in this layout.
            DataError: the tokenizer cannot be read.
        """
        if not config.evaluation.tasks:
            return None
        try:
            encoding = Encoding.open(settings_of(config.data, vocab_size), frozenset())
            tasks = load_tasks(config.evaluation.tasks, _KEY) if rank == 0 else None
        except EvaluationError as error:
            raise ConfigError(_KEY, str(error).removeprefix(f"{_KEY}: ")) from None
        parallel = config.parallel
        if tasks is not None and (parallel.sequence_parallel or parallel.context_parallel_size > 1):
            name = continues_text(tasks)
            if name is not None:
                raise ConfigError(
                    _KEY,
                    f"{name} generates text, which sequence and context parallelism exclude while "
                    "training; leave the task to llmctl evaluate",
                )
        return cls(config, encoding, tasks, vocab_size)

    def is_due(self, iteration: int) -> bool:
        """True if the tasks are evaluated after this iteration, apart from the last one."""
        every = self.config.evaluation.every
        return every is not None and iteration % every == 0

    def run(self, model: ParallelModel, device: torch.device, beat: Callable[[], None]) -> dict[str, dict[str, float]]:
        """Metrics by task on rank 0, nothing on all others. Collective: all ranks of the job.

        Raises:
            ConfigError: a task asks for something that this model cannot do.
        """
        trained = GenerationModel(model, self.config, self.vocab_size, Path(), 0, device)
        ranks = ModelRanks(trained, self.encoding.bare, beat)
        if self.tasks is None:
            ranks.follow()
            return {}
        from trainer.evaluation.harness import evaluate_tasks

        try:
            return evaluate_tasks(ranks, self.encoding, self.tasks, self.config.evaluation.limit)
        except EvaluationError as error:
            raise ConfigError(_KEY, str(error)) from None
        finally:
            ranks.release()
