"""The user's list of bad nodes, as ``llmctl nodes --excluded`` prints it."""

from dataclasses import asdict

from llmctl.cli.console import print_json
from llmctl.context import ClusterSession, Context, say
from llmctl.durations import duration_text
from llmctl.operate.bad_nodes import BadNodeList, read_bad_nodes
from llmctl.submit.bad_nodes.left_out import WORDS
from llmctl.terminal_text import printable

_COLUMNS = ("NODE", "FAILURES", "AGE", "RUN", "CAUSE")


def show_bad_nodes(context: Context, session: ClusterSession, *, as_json: bool) -> None:
    """Print the list as a table or one JSON document; remarks go to standard error."""
    found = read_bad_nodes(context, session)
    if as_json:
        print_json(asdict(found.document()))
        return
    for remark in found.remarks:
        say(remark)
    if not found.entries:
        say(f"{found.cluster}: your list of bad nodes is empty")
        return
    lines = [_COLUMNS, *_rows(found)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _rows(found: BadNodeList) -> list[tuple[str, ...]]:
    rows = []
    for bad in found.entries:
        old = "" if found.counts(bad) else "; too old to be left out"
        cause = f"{WORDS[bad.kind]}: {bad.cause}{old}"
        cells = (bad.node, str(bad.failures), duration_text(found.now - bad.time), f"{bad.run}, {bad.attempt}", cause)
        rows.append(tuple(printable(cell) for cell in cells))
    return rows
