"""Rows of calculon's own validation, and the planner's prediction of each.

All are of Korthikanti et al. 2022 (arXiv:2205.05198): figures 1 and 7 and table 5. Their layouts are those of the
published rows of table 5, with another recompute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.planner_rows.published import PublishedRun, published_runs
from trainer.planning.estimate.devices import GIB
from trainer.planning.estimate.plan import RunPlan

TIME, STATES, ACTIVATIONS, MODES = "time", "states", "activations", "recompute modes"
UNITS = {TIME: "s", STATES: "GiB", ACTIVATIONS: "GiB", MODES: "% of none"}
_TITLES = {"End-to-end": TIME, "*Params & Opt": STATES, "*Activations": ACTIVATIONS, "Activations": MODES}
"""First word of a table that calculon prints."""
_MODELS = {
    "megatron-22B": "Megatron-22B",
    "gpt3-175B": "GPT3-175B",
    "turing-530B": "MT-NLG-530B",
    "megatron-1T": "Megatron-1T",
}
"""Name in calculon, and in the published rows."""
_RECOMPUTE = {
    "none": ("", "no"),
    "seq": ("", "yes"),
    "sel": ("selective", "no"),
    "seqsel": ("selective", "yes"),
    "full": ("full", "no"),
}
"""Name in calculon; what is computed again, and sequence parallelism."""
_CELL = re.compile(r"([\d.]+)%?,([\d.]+)%?,(-?[\d.]+)%")
"""Published figure, calculon's, and 1 less calculon's by the published one."""


class ValidationError(Exception):
    """Calculon did not run, or printed something else; the message is one line."""


@dataclass(frozen=True)
class Row:
    """One figure of the paper, and calculon's, in the unit of the group.

    Attributes:
        group: of UNITS.
        model: as calculon calls it.
        mode: recompute and sequence parallelism, as calculon calls them.
        published: figure of the paper.
        calculon: what calculon predicts, as it prints it.
        calculon_error: predicted by published, less 1, before calculon rounded its figure.
    """

    group: str
    model: str
    mode: str
    published: float
    calculon: float
    calculon_error: float

    @property
    def ours(self) -> float:
        """The planner's figure."""
        plan = plan_of(self.model, self.mode)
        first = plan.ranks[0]
        if self.group == TIME:
            return plan.step.total
        if self.group == STATES:
            return first.states / GIB
        if self.group == ACTIVATIONS:
            return first.bytes_of["activations"] / GIB
        return 100 * first.bytes_of["activations"] / plan_of(self.model, "none").ranks[0].bytes_of["activations"]

    @property
    def without_embeddings(self) -> float:
        """States of a rank without embeddings and output layer; of a lone rank, its own."""
        ranks = plan_of(self.model, self.mode).ranks
        return ranks[len(ranks) // 2].states / GIB

    @property
    def with_replay(self) -> float:
        """Recompute modes as calculon counts them: with the layer that backward computes again."""
        first, none = (plan_of(self.model, mode).ranks[0].bytes_of for mode in (self.mode, "none"))
        return 100 * (first["activations"] + first["recompute"]) / none["activations"]


@cache
def plan_of(model: str, mode: str) -> RunPlan:
    """The planner's prediction of a model of calculon's with a mode of calculon's."""
    recompute, sequence_parallel = _RECOMPUTE[mode]
    return replace(_published(model), recompute=recompute, sequence_parallel=sequence_parallel).plan()


def _published(model: str) -> PublishedRun:
    return next(run for run in published_runs() if (run.source, run.model) == ("korthikanti", _MODELS[model]))


def run_validation(folder: Path) -> str:
    """Run calculon's validation; returns the text that it prints.

    Args:
        folder: checkout of calculon.

    Raises:
        ValidationError: it failed, with its last line.
    """
    ended = subprocess.run(
        [sys.executable, "bin/calculon", "llm-validation"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder.resolve())},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise ValidationError(f"{folder}: {(ended.stderr.strip() or 'no output').splitlines()[-1]}")
    return ended.stdout


def rows_of(text: str) -> Iterator[Row]:
    """The rows of what calculon's validation prints.

    Raises:
        ValidationError: a table is missing.
    """
    group, modes, seen = "", list[str](), set[str]()
    for line in text.splitlines():
        title, *cells = (cell.strip(",") for cell in line.split("|"))
        if title in _TITLES:
            group, modes = _TITLES[title], cells
            seen.add(group)
        elif title in _MODELS and group:
            for mode, cell in zip(modes, cells, strict=True):
                found = _CELL.match(cell)
                if found is None:
                    raise ValidationError(f"not a cell of calculon's validation: {cell}")
                yield Row(group, title, mode, float(found[1]), float(found[2]), round(-float(found[3]) / 100, 6))
    if seen != set(UNITS):
        raise ValidationError(f"calculon's validation has no table of {', '.join(sorted(set(UNITS) - seen))}")
