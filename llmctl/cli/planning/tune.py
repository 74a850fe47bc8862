"""``llmctl tune``: short runs of the fastest layouts in one job, and the fastest of them as a config."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.console import print_json
from llmctl.cli.planning.written_files import output_file, write_file
from llmctl.context import ClusterSession, Context, say
from llmctl.errors import INTERRUPTED, FollowedRunFailed, UsageError

if TYPE_CHECKING:
    from llmctl.operate.tuning.plan import Tuning
    from llmctl.operate.tuning.results import TuneResults

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_LAYOUTS, _STEPS, _MINUTES = 12, 4, 30.0


@app.command()
def tune(
    ctx: typer.Context,
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="Training config. Default: as for submit.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Cluster. Default: as for submit.", autocompletion=complete_cluster),
    ] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Nodes. Default: job.nodes.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks per node. Default: the node's GPUs.")
    ] = None,
    layouts: Annotated[int, typer.Option(metavar="N", min=1, help="Layouts to try, the fastest predicted ones.")] = (
        _LAYOUTS
    ),
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps that count in the first round; twice as many in each later.")
    ] = _STEPS,
    minutes: Annotated[
        float | None, typer.Option(metavar="N", min=1, help=f"Time for all trials. Default: {_MINUTES:g}.")
    ] = None,
    points: Annotated[
        float | None, typer.Option(metavar="N", min=0, help="Points that the job may cost, instead of --minutes.")
    ] = None,
    resource_type: Annotated[str | None, typer.Option(metavar="TYPE", help="Kind of node.")] = None,
    queue: Annotated[str | None, typer.Option(metavar="QUEUE", help="Queue or partition.")] = None,
    group: Annotated[str | None, typer.Option(metavar="GROUP", help="Group, project or account to bill.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run. Default: tune-CONFIG.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the config. Repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Start a new run, even if there is one.")] = False,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="Write the fastest layout as a config.")] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Draw tokens/s of the layouts.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the layouts; submit nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Try the fastest layouts that the planner finds in short runs inside one job, and keep the fastest.

    The slower half is left out after each round. The same command again shows the results, or goes on waiting.
    """
    if minutes is not None and points is not None:
        raise UsageError("--points: takes the place of --minutes; leave one of them out")
    context: Context = ctx.obj
    targets = [output_file(context, flag, value) for flag, value in (("--output", output), ("--svg", svg))]
    from llmctl.operate.tuning.plan import TuneAsked, plan_tuning
    from llmctl.submit.job import SubmitArguments

    job = {"nodes": nodes, "gpus_per_node": gpus_per_node, "resource_type": resource_type, "queue": queue}
    arguments = SubmitArguments(
        config=config,
        cluster=cluster,
        job={**job, "group": group, "name": name},
        settings=tuple(settings or ()),
        dry_run=dry_run,
    )
    limit = None if points is not None else minutes or _MINUTES
    tuning = plan_tuning(context, TuneAsked(arguments, layouts, steps, limit, points))
    if dry_run:
        _show_candidates(context, tuning)
        return 0
    results, code = _results(context, tuning, again=again)
    if results is None:
        return code
    _finish(results, targets[0], targets[1], as_json=as_json)
    return code


def _show_candidates(context: Context, tuning: "Tuning") -> None:
    print(f"{'STEP S':>8}  {'GIB':>6}  LAYOUT")
    for each in tuning.candidates:
        print(f"{each['seconds']:>8.3g}  {each['bytes'] / (1 << 30):>6.1f}  {each['name']}")
    for note in tuning.plan.warnings:
        context.tell(note)
    cost = tuning.plan.job.cost
    if cost is not None:
        context.tell(f"asks for {cost}")
    context.tell(f"{tuning.minutes:.0f} minutes of trials; nothing was submitted")


def _results(context: Context, tuning: "Tuning", *, again: bool) -> "tuple[TuneResults | None, int]":
    """The results of the run, waited for; and the exit code. None: no longer waited for."""
    from llmctl.operate.tuning.results import read_results
    from llmctl.operate.tuning.run import earlier_run, follow_tuning, has_ended, submit_tuning

    session = ClusterSession.of(context, tuning.plan.record.cluster, "--cluster")
    record = None if again else earlier_run(context, tuning, session)
    if record is None:
        record = submit_tuning(context, tuning)
    elif has_ended(record, session):
        results = read_results(record, session)
        left = [row for row in results.document["rows"] if row["outcome"] is None]
        context.tell(f"{record.run_id} has ended; --again starts a new run")
        if left:
            context.tell(f"{len(left)} layouts were not tried; go on with them: llmctl resume {record.run_id}")
        return results, 0
    else:
        context.tell(f"going on with {record.run_id}; --again starts a new run")
    code = 0
    try:
        code = follow_tuning(record, session)
    except FollowedRunFailed:
        results = read_results(record, session)
        if all(row["iteration_time_s"] is None for row in results.document["rows"]):
            raise
        code = 1
    if code == INTERRUPTED:
        context.tell("the same command waits again")
        return None, code
    return read_results(record, session), code


def _finish(results: "TuneResults", output: Path | None, svg: Path | None, *, as_json: bool) -> None:
    document = results.document
    if as_json:
        print_json(document)
    else:
        for line in _lines(results):
            print(line)
    if svg is not None:
        from llmctl.operate.tuning.drawing import svg_of
        from llmctl.submit.preview.place import counted

        size = f"{counted(document['nodes'], 'node')}, {counted(document['devices'], 'device')}"
        write_file(svg, "--svg", svg_of(f"{document['run_id']}: {size} of {document['cluster']}", document["rows"]))
    best = results.best_config()
    if output is not None and best is not None:
        import yaml

        write_file(output, "--output", yaml.safe_dump(best, sort_keys=False))
        say(f"fastest layout: {output}")


def _lines(results: "TuneResults") -> list[str]:
    from llmctl.runs.number_text import memory_text, rate_text

    lines = [
        f"{'TOKENS/S':>9}  {'STEP S':>8}  {'PREDICTED':>9}  {'MEMORY':>9}  {'PREDICTED':>9}  {'ROUNDS':>6}  LAYOUT"
    ]
    for row in results.document["rows"]:
        seconds, rate = row["iteration_time_s"], row["tokens_per_s"]
        measured = ("", "") if seconds is None or rate is None else (rate_text(rate), f"{seconds:.3g}")
        error = "" if seconds is None else f"{100 * (row['predicted_iteration_time_s'] / seconds - 1):+.0f}%"
        peak = "" if row["peak_memory_bytes"] is None else memory_text(row["peak_memory_bytes"])
        predicted = memory_text(row["predicted_peak_memory_bytes"])
        lines.append(
            f"{measured[0]:>9}  {measured[1]:>8}  {error:>9}  {peak:>9}  {predicted:>9}  {row['rounds']:>6}  "
            f"{row['layout']}{_why(row['outcome'], row['reason'])}"
        )
    return lines


def _why(outcome: str | None, reason: str) -> str:
    if outcome is None:
        return ": not tried"
    return "" if outcome == "ok" else f": {outcome.replace('_', ' ')}: {reason}"
