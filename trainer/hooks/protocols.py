"""Signatures of the user's functions that the section ``hooks`` names. Torch-free.

``hooks.lr_function: my_package.my_hooks:schedule`` names a function like LearningRate here, and so on. The functions
are imported on every rank, before the ranks meet. An exception in one ends the run, and the error names the function.

Legend: B micro-batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config.train_config import TrainConfig
    from trainer.distributed.mesh import ParallelMesh


class Batch(Protocol):
    """A micro-batch of whole samples, on the device of the rank."""

    @property
    def tokens(self) -> Tensor:
        """int64 [B, S]."""

    @property
    def labels(self) -> Tensor:
        """int64 [B, S]: the next token."""

    @property
    def loss_mask(self) -> Tensor | None:
        """[B, S]: 0 where the label does not count in the loss; None: all count."""


@dataclass(frozen=True)
class StepFacts:
    """A step that has just ended, as one rank sees the step. For reading only.

    Attributes:
        config: of the run; ``config.hooks.settings`` has your own values.
        mesh: this rank's place: ``mesh.tp_rank``, ``mesh.dp_rank`` and so on; ``mesh.rank`` of ``mesh.world_size``.
        iteration: number of completed iterations, this one included.
        losses: mean over the tokens of the global batch, ``lm_loss`` and further terms; the same on all ranks. Not
            finite if the step was skipped for that.
        learning_rate: of the step.
        grad_norm: of the whole model before clipping; None if not finite.
        was_skipped: the gradient was not finite, and the weights have not changed.
        micro_batches: of this rank's replica.
        parameters: this rank's part of the weights after the step, by global name.
    """

    config: TrainConfig
    mesh: ParallelMesh
    iteration: int
    losses: Mapping[str, float | None]
    learning_rate: float
    grad_norm: float | None
    was_skipped: bool
    micro_batches: Sequence[Batch]
    parameters: Mapping[str, Tensor]


class Dataset(Protocol):
    """``hooks.dataset_function``: the samples of a split."""

    def __call__(self, split: str, config: TrainConfig) -> Any:
        """A dataset with ``len(dataset)`` and ``dataset[index]``; None: no such split. ``split`` is train or valid.

        An item is an array or tensor on the CPU of training.seq_length + 1 integers, the tokens, of which all but the
        first are labels; or a pair of these and an array of training.seq_length numbers, 0 where the label does not
        count in the loss. All items have the same form.

        Called on every rank. An item must depend on its index alone: each rank reads the items of its replica itself,
        in a thread, and a resumed run reads on at its sample. Each epoch is shuffled by training.seed, unless the
        dataset has the attribute ``shuffle`` with the value False.
        """


class Tokenizer(Protocol):
    """The result of the function ``data.tokenizer_function``, which takes no arguments."""

    vocab_size: int
    """Number of ids: one more than the largest."""
    eod: int | None
    """Id of the token that ends a document; None without one."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text, without ``eod``; the same in every process."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids without ``eod``."""


class TokenLoss(Protocol):
    """``hooks.loss_function``: the loss of every token.

    Legend: N tokens of a micro-batch, V vocabulary without padding.
    """

    def __call__(self, logits: Tensor, labels: Tensor, config: TrainConfig) -> Tensor:
        """Losses [N], not averaged, from logits [N, V] in the dtype of the model and labels int64 [N].

        Called for each micro-batch of training and evaluation, on the ranks of the last pipeline stage. With tensor
        parallelism each of its ranks has the logits of the whole vocabulary, and all must compute the same. With
        context parallelism the tokens are this rank's part of the sequences. The trainer applies the loss mask, sums in
        float32 and divides by the number of valid tokens of the global batch.
        """


class LearningRate(Protocol):
    """``hooks.lr_function``: the learning rate of a step. Pure, since every rank and every resume computes the rate."""

    def __call__(self, step: int, config: TrainConfig) -> float:
        """Learning rate of the step that follows ``step`` earlier ones, at least 0.

        ``step`` is 0 at first, and goes on after a resume. A skipped step does not count, as in the built-in schedules.
        """


class Metric(Protocol):
    """``hooks.metrics``: a number of each row of metrics.jsonl."""

    def __call__(self, facts: StepFacts) -> tuple[float, float] | None:
        """This rank's sum and its weight, such as the number of tokens; None: nothing from this rank.

        Called on every rank at each iteration with a row. The row has ``metrics: {FUNCTION: number}``: the sum over all
        ranks divided by the weight over all ranks, null without weight. Ranks of one replica see the same
        micro-batches, which changes no such mean.
        """


class Callback(Protocol):
    """``hooks.after_step`` and ``hooks.before_save``."""

    def __call__(self, facts: StepFacts) -> None:
        """Do anything that changes neither weights nor random numbers. All ranks wait for the slowest.

        Called on every rank, in the order of the config: after each step and its row, or before each checkpoint. A
        collective in the function must be called on all ranks.
        """
