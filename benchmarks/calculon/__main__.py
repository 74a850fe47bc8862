"""Predictions of ``llmctl plan`` beside calculon's, over the rows of calculon's own validation.

    git clone https://github.com/calculon-ai/calculon
    python -m benchmarks.calculon calculon [--to PAGE]

Runs the validation of the checkout, and prints both tools' errors; with ``--to`` a page that also has every row.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.calculon.validation import (
    ACTIVATIONS,
    MODES,
    STATES,
    TIME,
    UNITS,
    Row,
    ValidationError,
    rows_of,
    run_validation,
)

PAGE = """# Predictions beside calculon

`python -m benchmarks.calculon CHECKOUT --to PAGE` makes this page. It runs `calculon llm-validation` of a checkout of
[calculon](https://github.com/calculon-ai/calculon) (Isaev et al. 2023), here of commit COMMIT, and predicts the same
rows with the planner. All rows are of Korthikanti et al. 2022 (arXiv:2205.05198), on A100. Errors are predicted by
published, less 1; means and medians are of absolute errors.

- Only the times are measurements. The published memory is what the paper's own formulas give, figure 1 to the last
  digit and figure 7 to its reading: 18 bytes per parameter without embeddings, and table 2. An error there is a
  difference between two ways to count.
- None of the rows is a test of rows that nobody had seen, for neither tool. The 8 times are the rows `korthikanti` of
  [the published runs](planner_rows.md): they were in view when the shares of the A100 were set, as those of `narayanan`
  and others were. The bytes of a layer were compared with table 2 before, as
  [the guide](../../docs/guide/planning.md#compared-with-korthikanti-et-al) has it; nothing was set by it. Nothing was
  changed for this page.
- The states and activations of the planner are those of the first pipeline rank. It counts embeddings; the formulas
  and calculon do not.
- The planner's activations are those of this trainer: it draws masks of hidden dropout again, and keeps the result of
  unfused attention a second time, in the order of heads. Megatron-LM does neither.
- A recompute mode is the share of the activations without recompute, so that 4 of the 20 rows, `none`, have no error.
  Calculon adds the layer that backward computes again to `full`; the formula and the planner's activations do not.

"""
_GROUPS = {
    TIME: "table 5, measured",
    STATES: "figure 1, by a formula",
    ACTIVATIONS: "figure 1, by a formula",
    MODES: "figure 7, by a formula",
}


def main() -> int:
    """Print the errors, or write the page; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="checkout of calculon")
    parser.add_argument("--to", type=Path, help="write this page")
    options = parser.parse_args()
    try:
        rows = list(rows_of(run_validation(options.folder)))
    except (ValidationError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    summary = list(summary_lines(rows))
    print("\n".join(summary))
    if options.to is not None:
        head = PAGE.replace("COMMIT", commit_of(options.folder))
        parts = [head + "\n".join(summary), "## Rows", "\n".join(row_lines(rows))]
        options.to.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return 0


def commit_of(folder: Path) -> str:
    """Commit of a checkout; ``unknown`` of a folder that is none."""
    argv = ["git", "-C", str(folder), "log", "-1", "--format=%h of %cs"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or "unknown"


def summary_lines(rows: Sequence[Row]) -> Iterator[str]:
    """A table with a line for each group, and for the two that can be counted in another way."""
    yield "| group | published | rows | calculon: mean | median | largest | planner: mean | median | largest |"
    yield "|---" * 9 + "|"
    for group, source in _GROUPS.items():
        own = [row for row in rows if row.group == group]
        yield _summary(group, source, own, [row.ours for row in own])
        if group == STATES:
            yield _summary("states without embeddings", source, own, [row.without_embeddings for row in own])
        if group == MODES:
            yield _summary("recompute modes with the replayed layer", source, own, [row.with_replay for row in own])


def _summary(name: str, source: str, rows: Sequence[Row], ours: Sequence[float]) -> str:
    cells = [name, source, str(len(rows))]
    own = [one / row.published - 1 for one, row in zip(ours, rows, strict=True)]
    for signed in ([row.calculon_error for row in rows], own):
        errors = [abs(error) for error in signed]
        cells += [f"{100 * figure:.2f}%" for figure in (mean(errors), median(errors), max(errors))]
    return f"| {' | '.join(cells)} |"


def row_lines(rows: Sequence[Row]) -> Iterator[str]:
    """A table with a line for each row."""
    yield "| group | model | mode | published | calculon | error | planner | error |"
    yield "|---" * 8 + "|"
    yield from map(row_line, rows)


def row_line(row: Row) -> str:
    """The line of a row."""
    cells = [f"{row.group}, {UNITS[row.group]}", row.model, row.mode, f"{row.published:.8g}"]
    for predicted, error in ((row.calculon, row.calculon_error), (row.ours, row.ours / row.published - 1)):
        cells += [f"{predicted:.2f}", f"{100 * error:+.2f}%"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
