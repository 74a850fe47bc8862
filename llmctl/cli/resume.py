"""``llmctl resume``: the next submission of a run, in the same run directory."""

from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.completion import complete_run
from llmctl.context import Context, say

if TYPE_CHECKING:
    from llmctl.operate.submission import Resumed

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def resume(
    ctx: typer.Context,
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Run id, its beginning, run name or job id.", autocompletion=complete_run),
    ],
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="New number of nodes.")] = None,
    exclude: Annotated[
        str | None, typer.Option(metavar="HOST[,HOST]", help="Nodes to leave out. Default: as before.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set a key of the run's config; the value is YAML. Repeatable."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan of the resume; submit nothing.")] = False,
    show_script: Annotated[
        bool, typer.Option("--show-script", help="Print script and submit command; submit nothing.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Follow the run until it ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Resume an ended run from its latest checkpoint, with its own config and code."""
    from llmctl.cli.submit import Display, carry_out, follow_started, show_plan
    from llmctl.operate.resume import planned_resume

    context: Context = ctx.obj
    is_dry = dry_run or show_script
    entry = context.index.find(run)
    planned = planned_resume(
        context, entry, nodes=nodes, exclude=exclude, settings=tuple(settings or ()), dry_run=is_dry
    )
    with planned as (plan, point):
        say(f"{entry.run_id}: {point.sentence}")
        more: Resumed = {"resumes_from": point.iteration}
        display = Display(dry_run=dry_run, script=show_script, as_json=as_json, follow=follow, more=more)
        if is_dry:
            show_plan(plan, context, display)
            return 0
        record = carry_out(plan, context, display)
    return follow_started(record, context, as_json=as_json) if follow else 0
