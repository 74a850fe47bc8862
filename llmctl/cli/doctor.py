"""``llmctl doctor``: check a cluster, with a remedy for each problem."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.console import is_for_people, print_json, rich_console
from llmctl.context import Context
from llmctl.doctor.examine import examine, exit_code
from llmctl.doctor.python import Check
from llmctl.terminal_text import printable

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "FAULT": "bold red"}


@dataclass(frozen=True)
class DoctorDocument:
    """The document of ``--json``.

    Attributes:
        cluster: name of the profile.
        faults: number of checks in state FAULT.
        checks: the checks, in order.
    """

    cluster: str
    faults: int
    checks: Sequence[Check]


@app.command()
def doctor(
    ctx: typer.Context,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Cluster. Default: as for submit.", autocompletion=complete_cluster),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Check a cluster: connection, scheduler, group, paths, quota, Python, torch, GPUs, containers.

    Each line begins with ok, note (not testable from here), warning or FAULT. The line after a problem gives the
    remedy. The exit code is 0, or the class of the first fault: 3 profile, 4 connection or scheduler.
    """
    context: Context = ctx.obj
    profile = context.profile(*context.cluster(cluster))
    checks: list[Check] = []
    console = rich_console() if is_for_people() and not as_json else None
    for check in examine(context, profile):
        checks.append(check)
        if as_json:
            continue
        detail = printable(check.detail)
        if console is None:
            print(f"{check.state:8} {check.name:17} {detail}")
        else:
            console.print(f"{check.state:8}", style=_STYLES[check.state], end=" ")
            console.print(f"{check.name:17} {detail}", markup=False, soft_wrap=True)
        if check.remedy:
            print(f"{'':8} {'':17} fix: {printable(check.remedy)}")
    if as_json:
        faults = sum(check.state == "FAULT" for check in checks)
        print_json(asdict(DoctorDocument(profile.name, faults, checks)))
    return exit_code(checks)
