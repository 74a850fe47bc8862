"""The table of a corpus: sources by outcomes, and the reasons of the refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.published_corpus.outcomes import CRASHED, IMPORTED, REFUSED, SILENT, Outcome, trains_nothing
from benchmarks.published_corpus.texts import Published
from benchmarks.published_corpus.trials import TRAINS

_SHOWN = 160


@dataclass(frozen=True)
class Row:
    """A script with its outcome."""

    script: Published
    outcome: Outcome

    @property
    def is_known(self) -> bool:
        """True if the script starts one of the known programs to train."""
        return self.script.is_known and not trains_nothing(self.outcome)


def _imported_after(fewest: int, most: int) -> Callable[[Row], bool]:
    return lambda row: row.outcome.kind == IMPORTED and fewest <= answers_of(row.outcome) <= most


def answers_of(outcome: Outcome) -> int:
    """Number of answers with which a script was imported; its arguments, which ``-- ARGS`` gives together, are one."""
    named = [name for name, _ in outcome.given if not name.isdigit()]
    return len(named) + (len(named) < len(outcome.given)) + outcome.files


# A column is a title with the rows that it counts; a further measurement is a further line.
COLUMNS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("scripts", lambda _row: True),
    ("as is", _imported_after(0, 0)),
    ("one answer", _imported_after(1, 1)),
    ("more answers", _imported_after(2, 99)),
    ("asked once at most", lambda row: row.outcome.kind == IMPORTED and row.outcome.rounds <= 1),
    ("train ten steps", lambda row: row.outcome.trial == TRAINS),
    ("refused", lambda row: row.outcome.kind == REFUSED),
    ("crashed", lambda row: row.outcome.kind == CRASHED),
    ("lost a file", lambda row: row.outcome.kind == SILENT),
)
_INTRODUCTION = """\
Every distinct script that names `pretrain_gpt.py`, `pretrain_bert.py` or `pretrain_t5.py`. A question is
a variable that the script leaves open, answered by a program with a value of the kind of its name; all of
a script's questions come at once (`asked once at most`), and its arguments `$1` and on, which `-- ARGS` gives
together, are one answer. Ten steps are made on a CPU at a small size, with
the script's own kinds of layers, precision, optimizer, data, tokenizer and meaning of its checkpoints, after
all checks of `llmctl submit`.

The program's answers: of a script that is refused without them, arguments before one that it asks for are given
too. A number of tokens, samples or iterations is large, so that it fits the script's own decay, one of warmup is small,
and one that a division makes 0 is given anew. A variable of a condition has the value with which the condition compares
it. At most 24 answers are given. A file that a script asks for is made up if it has the groups of
`--train-weighted-split-paths-path`, and copied if its template stands beside the script's folder; each counts as an
answer. Scripts that are refused for this alone, that they convert a checkpoint or train nothing, stand under
`Scripts of other programs`.""".splitlines()
_OTHER_PROGRAM = "is not a known training program"
_READING = ("--arg", "is never executed", "that the script leaves open", "is not set")
_MODEL = ("(model.", "models with", "attention variant")


def kind_of(reason: str) -> str:
    """The area of a reason: reading, flags, models or programs."""
    if _OTHER_PROGRAM in reason:
        return "programs"
    if any(words in reason for words in _MODEL):
        return "models"
    if reason.startswith("--") and not any(words in reason for words in _READING):
        return "flags"
    return "reading"


def page_of(
    scripts: Sequence[Row], configs: Sequence[Row], commits: Mapping[str, Sequence[str]], head: str
) -> list[str]:
    """Lines of the page.

    Args:
        scripts: of the repositories.
        configs: of Megatron-LM's functional tests.
        commits: OWNER/NAME -> branches with their commits.
        head: a sentence with version and day.
    """
    known, other = [row for row in scripts if row.is_known], [row for row in scripts if not row.is_known]
    lines = ["# Published scripts through the importer", "", head, "", *_INTRODUCTION, ""]
    lines += [
        *_sources(known),
        "",
        *_trials(known),
        "## Reasons",
        "",
        *_reasons(known),
        "",
        "## Scripts of other programs",
        "",
    ]
    lines += [*_sources(other), "", *_reasons(other), "", "## Functional tests of Megatron-LM", ""]
    lines += ["The flags of every distinct `model_config.yaml` as a training line. Tests of inference and of other"]
    lines += ["programs stand in the last table.", ""]
    tests, rest = [row for row in configs if row.script.is_known], [row for row in configs if not row.script.is_known]
    lines += [*_sources(tests), "", *_trials(tests), *_reasons(tests), "", *_sources(rest), "", "## Commits", ""]
    lines += [f"- {source}: {', '.join(one[:-30] for one in found)}" for source, found in commits.items()]
    return lines


def _sources(rows: Sequence[Row]) -> list[str]:
    titles = [title for title, _ in COLUMNS]
    lines = [f"| source | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        by_source.setdefault(row.script.source, []).append(row)
    for source, ones in [*by_source.items(), ("all", list(rows))]:
        lines.append(f"| {source} | {' | '.join(str(sum(map(counts, ones))) for _, counts in COLUMNS)} |")
    return lines


def _trials(rows: Sequence[Row]) -> list[str]:
    """The reasons why imported scripts did not make their ten steps."""
    counts = Counter(row.outcome.trial for row in rows if row.outcome.trial not in ("", TRAINS))
    lines = [f"- {count} do not train: {_as_text(reason)}" for reason, count in counts.most_common()]
    return [*lines, ""] if lines else []


def _reasons(rows: Sequence[Row]) -> list[str]:
    counts = Counter(row.outcome.reason for row in rows if row.outcome.kind != IMPORTED)
    kinds = Counter(kind_of(reason) for reason in counts.elements())
    lines = [", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) + ".", ""] if counts else []
    lines += ["| scripts | area | reason |", "|---|---|---|"]
    for reason, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
        shown = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN]}..."
        lines.append(f"| {count} | {kind_of(reason)} | {_as_text(shown)} |")
    return lines


def _as_text(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
