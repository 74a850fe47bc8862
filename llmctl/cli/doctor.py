"""``llmctl doctor``: check a cluster, with a remedy for each problem."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.console import is_for_people, print_json, rich_console
from llmctl.context import Context
from llmctl.doctor.examine import examine, exit_code
from llmctl.doctor.python import Check
from llmctl.errors import UsageError
from llmctl.terminal_text import printable

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile

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
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Run the remedies that only add something, after a question; then check again."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --fix: do not ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Check a cluster: connection, scheduler, group, paths, quota, Python, torch, GPUs, containers.

    Each line begins with ok, note (not testable from here), warning or FAULT. The line after a problem gives the
    remedy. The exit code is 0, or the class of the first fault: 3 profile, 4 connection or scheduler.
    """
    if (fix and as_json) or (yes and not fix):
        raise UsageError("--json: --fix prints no document" if fix else "--yes: belongs to --fix")
    context: Context = ctx.obj
    profile = context.profile(*context.cluster(cluster))
    checks = _examined(context, profile, as_json=as_json)
    if as_json:
        faults = sum(check.state == "FAULT" for check in checks)
        print_json(asdict(DoctorDocument(profile.name, faults, checks)))
    if fix and _fixed(context, profile, checks, yes=yes):
        checks = _examined(context, profile, as_json=False)
    return exit_code(checks)


def _examined(context: Context, profile: "ClusterProfile", *, as_json: bool) -> list[Check]:
    """Examine a cluster, and show each check as it completes."""
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
    return checks


def _fixed(context: Context, profile: "ClusterProfile", checks: Sequence[Check], *, yes: bool) -> bool:
    """List the cures, ask, and run them; False if there are none, or the answer is no.

    Raises:
        UsageError: nobody can answer.
    """
    from llmctl.operate.environment.cures import cures_of, run_cures

    cures = cures_of(checks)
    if not cures:
        context.tell("--fix: no remedy is a command that llmctl runs by itself")
        return False
    context.tell("\n".join(["--fix runs:", *(f"    {shlex.join(cure)}" for cure in cures)]))
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError("--fix: nothing was run, since nobody can answer; --yes runs these commands")
        if not typer.confirm(f"run {'this' if len(cures) == 1 else 'these'} for {profile.name}?", err=True):
            return False
    run_cures(context, profile, cures)
    return True
