"""The lines of the screens about runs, ranks, nodes and attempts. Pure."""

import time
from collections.abc import Sequence

from rich.text import Text

from llmctl.durations import short_duration
from llmctl.job_state import JobState
from llmctl.operate.report.gather import Attempt
from llmctl.runs.facts import Heartbeat
from llmctl.runs.hang import hanging_ranks
from llmctl.runs.view import PHASES, RunView
from llmctl.runs.view_text import COLUMNS, FIRST_NUMBER, cells, colour, one_line, reason
from llmctl.terminal_text import printable
from llmctl.watch.rows import Column, lay_out
from llmctl.watch.source import RunPage

MOST_RANKS = 512
"""Rows of the list of ranks, those that matter first."""
_LEAVES = {"TRY": 1, "CLUSTER": 2, "MFU": 3, "AGE": 4, "TOKENS/S": 5}
_RUN_COLUMNS = (
    *(
        Column(name, is_number=number >= FIRST_NUMBER, leaves=_LEAVES.get(name, 9 if number > FIRST_NUMBER else None))
        for number, name in enumerate(COLUMNS)
    ),
    Column("DETAIL", leaves=0, fills=True),
)
_RANK_COLUMNS = (
    Column(" "),
    Column("RANK", is_number=True),
    Column("NODE"),
    Column("PHASE", fills=True, leaves=9),
    Column("ITERATION", is_number=True),
    Column("AGE", is_number=True),
)
_NODE_COLUMNS = (
    Column(" "),
    Column("NODE"),
    Column("RANKS", is_number=True),
    Column("PHASE", fills=True, leaves=9),
    Column("ITERATION", is_number=True),
    Column("AGE", is_number=True),
)


def run_table(views: Sequence[RunView], width: int) -> tuple[Text, list[Text]]:
    """Header and lines of the table of runs."""
    rows = []
    has_clusters = len({view.cluster for view in views}) > 1
    for view in views:
        row = [Text(one_line(cell)) for cell in cells(view)]
        row[COLUMNS.index("STATE")].stylize(colour(view.state))
        if not has_clusters:
            row[COLUMNS.index("CLUSTER")] = Text()
        rows.append([*row, Text(one_line(reason(view)))])
    return lay_out(_RUN_COLUMNS, rows, width)


def counts(views: Sequence[RunView], hidden: int) -> str:
    """``5 runs: 2 running, 1 pending``."""
    states = [view.state for view in views]
    parts = ", ".join(f"{states.count(state)} {state}" for state in JobState if state in states)
    words = f"{len(views)} run{'' if len(views) == 1 else 's'}" + (f": {parts}" if parts else "")
    return words + (f"; {hidden} more ended" if hidden else "")


def matches(view: RunView, words: str) -> bool:
    """True if each word is in the run's id, name, cluster, state or reason."""
    text = f"{view.run_id} {view.name} {view.cluster} {view.state} {view.detail}".lower()
    return all(word in text for word in words.lower().split())


def head(view: RunView) -> Text:
    """The run with its state and its numbers, in two lines, and below them its reason."""
    values = dict(zip(COLUMNS, cells(view), strict=True))
    lines = Text.assemble(
        (values["RUN"], "bold"), "  ", (view.state.value, colour(view.state)), "  on ", values["CLUSTER"]
    )
    if view.metrics_age_s is not None:
        lines.append(f"  metrics {values['AGE']} old", "dim")
    lines.append("\n")
    names = {"ITERATION": "iteration", "LOSS": "loss", "TOKENS/S": "tokens/s", "MFU": "MFU", "ETA": "left"}
    shown = [(name, values[key]) for key, name in names.items() if values[key] != "-"]
    for number, (name, value) in enumerate(shown):
        lines.append("  " if number else "").append(f"{name} ", "dim").append(value)
    why = one_line(reason(view))
    if not why and view.phase is not None:
        why = one_line(view.phase)
    return lines.append("\n").append(why, colour(view.state) if reason(view) else "")


def rank_table(page: RunPage, width: int) -> tuple[Text, list[str], list[Text]]:
    """Header, ranks and lines of the table of ranks: hanging and failed ones first, and marked."""
    marked = _marked(page)
    order = sorted(page.heartbeats, key=lambda beat: (beat.rank not in marked, beat.time if beat.rank in marked else 0))
    order = order[:MOST_RANKS]
    rows = [
        [
            Text("!" if beat.rank in marked else ""),
            Text(str(beat.rank)),
            Text(one_line(beat.host)),
            Text(one_line(beat.phase)),
            Text(str(beat.iteration)),
            Text(short_duration(page.read - beat.time)),
        ]
        for beat in order
    ]
    header, lines = lay_out(_RANK_COLUMNS, rows, width)
    for beat, line in zip(order, lines, strict=True):
        if beat.rank in marked:
            line.stylize("red")
    return header, [str(beat.rank) for beat in order], lines


def node_table(page: RunPage, width: int) -> tuple[Text, list[Text]]:
    """Header and lines of the table of nodes, in the order of their ranks; each has its slowest rank's point."""
    marked = _marked(page)
    groups: dict[str, list[Heartbeat]] = {host: [] for host in page.view.hosts}
    for beat in page.heartbeats:
        groups.setdefault(beat.host, []).append(beat)
    rows = [
        [
            Text("!" if any(beat.rank in marked for beat in beats) else ""),
            Text(one_line(host)),
            Text(str(len(beats)) if beats else "-"),
            Text(", ".join(dict.fromkeys(one_line(PHASES.get(beat.phase, beat.phase)) for beat in beats))),
            Text(str(min(beat.iteration for beat in beats)) if beats else "-"),
            Text(short_duration(page.read - min(beat.time for beat in beats)) if beats else "-"),
        ]
        for host, beats in groups.items()
    ]
    header, lines = lay_out(_NODE_COLUMNS, rows, width)
    for row, line in zip(rows, lines, strict=True):
        if row[0].plain:
            line.stylize("red")
    return header, lines


def _marked(page: RunPage) -> set[int]:
    """The ranks to look at first: those that hang, or the one that failed first."""
    error = page.attempts[-1].error if page.attempts else None
    if error is not None:
        return {error.rank}
    if page.view.state is not JobState.RUNNING:
        return set()
    return hanging_ranks(page.heartbeats, page.read, page.view.iteration_time_s)


def attempt_lines(page: RunPage) -> Text:
    """All attempts, the newest first: their times, nodes and ends."""
    lines = Text()
    for attempt in reversed(page.attempts):
        is_last = attempt is page.attempts[-1]
        lines.append("\n" if lines.plain else "").append_text(_attempt_line(attempt, page, is_last=is_last))
        nodes = ", ".join(one_line(host) for host in attempt.hosts)
        if nodes:
            lines.append(f"\n  {len(attempt.hosts)} node{'' if len(attempt.hosts) == 1 else 's'}: {nodes}")
        cause = attempt.error.summary() if attempt.error is not None else ""
        cause = cause or (attempt.ending.cause if attempt.ending is not None else "")
        if cause:
            lines.append("\n  ").append(one_line(cause), "red")
    return lines if lines.plain else Text("no attempt yet")


def _attempt_line(attempt: Attempt, page: RunPage, *, is_last: bool) -> Text:
    begun = attempt.started.time if attempt.started is not None else None
    ended = attempt.ending.time if attempt.ending is not None else None
    line = Text.assemble((f"attempt {attempt.number}", "bold"))
    if begun is not None:
        line.append(time.strftime("  %Y-%m-%d %H:%M:%S", time.localtime(begun)))
    until = ended if ended is not None else page.now if is_last and not page.view.state.is_finished else None
    if begun is not None and until is not None:
        line.append(f"  for {short_duration(until - begun)}")
    if attempt.ending is not None:
        style = "red" if attempt.has_failed else "green"
        return line.append("  ").append(printable(attempt.ending.reason), style)
    state = page.view.state if is_last else JobState.UNKNOWN
    return line.append("  ").append("its end is not known" if not is_last else state.value, colour(state))
