"""Predicted bytes that a layer keeps for backward, beside the formulas of Korthikanti et al. 2022 (arXiv:2205.05198).

    python -m benchmarks.activation_formulas

Prints the two tables of docs/guide/planning.md. The layer is the paper's: GELU, LayerNorm, dropout, 16 bits, and scores
in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config
from trainer.planning.estimate.activations import stage_bytes

MIB = 1 << 20
LENGTH = 2048
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
_SELECTIVE = {"recompute_granularity": "selective"}


@dataclass(frozen=True)
class Shape:
    """A model of table 3: its name, attention heads, width, tensor-parallel ranks, and samples of a micro-batch."""

    name: str
    heads: int
    hidden: int
    tp: int
    samples: int

    @property
    def unit(self) -> int:
        """Tokens times width, of which the paper counts."""
        return self.samples * LENGTH * self.hidden

    @property
    def scores(self) -> float:
        """Bytes per token and channel of the scores: 5 a s / h."""
        return 5 * self.heads * LENGTH / self.hidden


SHAPES = (
    Shape("22B", 64, 6144, 8, 4),
    Shape("175B", 96, 12288, 8, 1),
    Shape("530B", 128, 20480, 8, 1),
    Shape("1T", 160, 25600, 8, 1),
)


@dataclass(frozen=True)
class Form:
    """A row of the paper's table 2: a layout, and what is computed again.

    Attributes:
        name: of the row.
        whole: bytes per token and channel that every rank of tensor parallelism keeps.
        divided: those that are divided among the ranks, without scores.
        has_scores: scores are kept, divided among the ranks.
        is_parallel: tensor parallelism.
        is_sequence_parallel: sequence parallelism too.
        training: keys of the recompute.
    """

    name: str
    whole: int
    divided: int
    has_scores: bool
    is_parallel: bool
    is_sequence_parallel: bool
    training: dict[str, Any]

    def paper_bytes(self, shape: Shape) -> float:
        """Bytes of a layer by table 2."""
        ranks = shape.tp if self.is_parallel else 1
        return shape.unit * (self.whole + (self.divided + self.has_scores * shape.scores) / ranks)

    def config(self, shape: Shape) -> TrainConfig:
        """One layer of the shape."""
        return build_config(
            {
                "model": {
                    "num_layers": 1,
                    "hidden_size": shape.hidden,
                    "num_attention_heads": shape.heads,
                    "attention_backend": "unfused",
                    "attention_dropout": 0.1,
                    "hidden_dropout": 0.1,
                    "max_position_embeddings": LENGTH,
                },
                "parallel": {
                    "tensor_model_parallel_size": shape.tp if self.is_parallel else 1,
                    "sequence_parallel": self.is_sequence_parallel,
                },
                "training": {
                    "train_iters": 1,
                    "seq_length": LENGTH,
                    "micro_batch_size": shape.samples,
                    "global_batch_size": shape.samples,
                    "bf16": True,
                    **self.training,
                },
                "optimizer": {"lr": 1e-4},
            }
        )

    def predicted_bytes(self, shape: Shape) -> int:
        """Bytes of a layer by the planner."""
        return stage_bytes(self.config(shape), range(1))[0]


FORMS = (
    Form("no parallelism", 0, 34, True, False, False, {}),
    Form("tensor", 10, 24, True, True, False, {}),
    Form("tensor, sequence", 0, 34, True, True, True, {}),
    Form("tensor, selective", 10, 24, False, True, False, _SELECTIVE),
    Form("tensor, sequence, selective", 0, 34, False, True, True, _SELECTIVE),
    Form("full", 2, 0, False, True, False, _FULL),
    Form("sequence, full", 2, 0, False, True, True, _FULL),
)
TERMS = (
    ("inputs of the two norms", "4", "4", "not, with sequence parallelism yes"),
    ("inputs of QKV and of the first product", "4", "4", "not, with sequence parallelism yes"),
    ("masks of hidden dropout", "2", "0: drawn again in backward", "not, with sequence parallelism yes"),
    ("queries, keys, values", "6", "6", "yes"),
    ("result of attention", "2", "2; with kept scores 2 more, in the order of heads", "yes"),
    ("scores: after the softmax, after dropout, mask", "5 a s / h", "5 a s / h", "yes"),
    ("inputs of GELU and of the second product", "16", "16", "yes"),
    ("float32 statistics of the norms", "left out", "8 / h", "not"),
    ("full recompute: input of the layer", "2", "2", "not; with sequence parallelism yes, in the paper not"),
)
"""Term, bytes per token and channel in the paper and here, divided among tensor-parallel ranks or not."""


def term_lines() -> Iterator[str]:
    """The table of terms."""
    yield "| kept by a layer | Korthikanti et al. | here | divided by tensor parallelism |"
    yield "|---" * 4 + "|"
    yield from (f"| {' | '.join(term)} |" for term in TERMS)


def form_lines() -> Iterator[str]:
    """The table of all forms and models: MiB of a layer in the paper, and here."""
    yield f"| MiB of a layer: paper, here | {' | '.join(shape.name for shape in SHAPES)} |"
    yield "|---" * (1 + len(SHAPES)) + "|"
    for form in FORMS:
        pairs = [(form.paper_bytes(shape) / MIB, form.predicted_bytes(shape) / MIB) for shape in SHAPES]
        cells = [f"{paper:,.0f}, {here:,.0f} ({100 * (here / paper - 1):+.1f}%)" for paper, here in pairs]
        yield f"| {form.name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join((*term_lines(), "", *form_lines())))
