"""``llmctl scale``: short runs of one config on several numbers of nodes, and a table of their speed."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.console import print_json
from llmctl.cli.planning.written_files import output_file, write_file
from llmctl.context import Context
from llmctl.errors import INTERRUPTED, FollowedRunFailed, UsageError

if TYPE_CHECKING:
    from llmctl.operate.scale.kept import Scaling
    from llmctl.operate.scale.plan import Asked, SizePlan
    from llmctl.operate.scale.table import SizeState
    from llmctl.submit.job import SubmitArguments

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_STEPS = 20


@app.command()
def scale(
    ctx: typer.Context,
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG", help="Training config. Default: as for submit. Without --nodes: name of a scaling."
        ),
    ] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N,N", help="Numbers of nodes, such as 1,2,4,8.")] = None,
    weak: Annotated[bool, typer.Option("--weak", help="The global batch grows with the nodes.")] = False,
    steps: Annotated[int | None, typer.Option(metavar="N", help=f"Iterations of each run. Default: {_STEPS}.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Cluster. Default: as for submit.", autocompletion=complete_cluster),
    ] = None,
    resource_type: Annotated[str | None, typer.Option(metavar="TYPE", help="Kind of node.")] = None,
    queue: Annotated[str | None, typer.Option(metavar="QUEUE", help="Queue or partition.")] = None,
    group: Annotated[str | None, typer.Option(metavar="GROUP", help="Group, project or account to bill.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks per node. Default: the node's GPUs.")
    ] = None,
    launcher: Annotated[str | None, typer.Option(metavar="torchrun|srun|mpirun", help="Launcher of the ranks.")] = None,
    container: Annotated[str | None, typer.Option(metavar="IMAGE", help="Container image.")] = None,
    time: Annotated[str | None, typer.Option(metavar="H:M:S", help="Time limit of each job; 10m and 1h too.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the scaling. Default: of CONFIG.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the config. Repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Run sizes that have failed again.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Without --nodes: wait for the runs.")] = False,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Draw tokens/s over nodes.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show jobs and predictions; submit nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Measure how a training scales: a short run for each number of nodes, and a table of efficiency.

    Strong scaling: all sizes have the same global batch. The runs are called NAME-1n, NAME-2n and so on.
    """
    given: dict[str, Any] = dict(locals())
    context: Context = ctx.obj
    output = _Output(context, as_json=as_json, svg=output_file(context, "--svg", svg))
    if nodes is None:
        _refuse_flags(given)
        return _show_known(context, config, output, follow=follow)
    from llmctl.operate.scale.plan import read_asked
    from llmctl.operate.scale.settings import LEAST_STEPS
    from llmctl.operate.scale.sizes import parse_sizes

    count = _STEPS if steps is None else steps
    if count < LEAST_STEPS:
        raise UsageError(f"--steps {count}: the first steps do not count; give {LEAST_STEPS} or more")
    asked, warnings = read_asked(context, _arguments(given), parse_sizes(nodes), steps=count, is_weak=weak)
    for warning in warnings:
        context.tell(warning)
    return _show_planned(asked, output) if dry_run else _run(asked, output, again=again)


def _arguments(given: Mapping[str, Any]) -> "SubmitArguments":
    from llmctl.submit.job import SubmitArguments

    keys = ("resource_type", "queue", "group", "gpus_per_node", "launcher", "container", "time", "name")
    return SubmitArguments(
        config=given["config"],
        cluster=given["cluster"],
        job={key: given[key] for key in keys},
        settings=tuple(given["settings"] or ()),
        dry_run=given["dry_run"],
    )


def _refuse_flags(given: Mapping[str, Any]) -> None:
    """Flags of a new scaling have no effect on one that there is."""
    shown = {
        "settings": "set",
        "dry_run": "dry-run",
        "gpus_per_node": "gpus-per-node",
        "resource_type": "resource-type",
    }
    kept = ("ctx", "config", "nodes", "follow", "svg", "as_json")
    flags = [f"--{shown.get(key, key)}" for key, value in given.items() if key not in kept and value]
    if flags:
        raise UsageError(f"{', '.join(flags)}: goes with --nodes; give the numbers of nodes, such as --nodes 1,2,4,8")


def _show_known(context: Context, name: str | None, output: "_Output", *, follow: bool) -> int:
    """The table of a scaling that there is."""
    from llmctl.operate.scale.kept import ScalingFiles
    from llmctl.operate.scale.measure import SizeSurvey
    from llmctl.operate.survey import RunSurvey

    files = ScalingFiles(context.folders.state)
    scaling = None if name is None else files.find(name)
    if scaling is None:
        names = files.names()
        known = f"; scalings that there are: {', '.join(names)}" if names else ""
        what = "" if name is None else f"no scaling is called {name!r}; "
        raise UsageError(f"--nodes: {what}to measure, give the numbers of nodes, such as --nodes 1,2,4,8{known}")
    if follow:
        return _follow(context, scaling, (), output)
    states = SizeSurvey(RunSurvey(context)).look(scaling)
    output.show(scaling, states)
    for line in _reasons([state for state in states if state.has_failed]):
        context.tell(line)
    going = sum(state.is_going for state in states)
    if going:
        runs = "1 run has" if going == 1 else f"{going} runs have"
        context.tell(f"{runs} not ended; to wait: llmctl scale {scaling.name} --follow")
    output.finish(scaling, states)
    return 0


def _show_planned(asked: "Asked", output: "_Output") -> int:
    """``--dry-run``: the jobs, and what the planner predicts."""
    from llmctl.operate.scale.plan import notes_of, plan_sizes
    from llmctl.operate.scale.table import SizeState

    plans = plan_sizes(asked, asked.sizes)
    states = [SizeState(each.run) for each in plans]
    if not output.as_json:
        from llmctl.cli.planning.scale_table import predicted_lines

        for line in predicted_lines(asked.scaling.name, states):
            print(line)
    for note in notes_of(asked, plans):
        asked.context.tell(note)
    output.finish(asked.scaling, states)
    asked.context.tell("nothing was submitted")
    return 0


def _run(asked: "Asked", output: "_Output", *, again: bool) -> int:
    """Submit the sizes that have not run, and wait for all."""
    from llmctl.operate.scale.measure import SizeSurvey
    from llmctl.operate.scale.plan import notes_of, plan_sizes
    from llmctl.operate.survey import RunSurvey

    context, scaling = asked.context, asked.scaling
    known = {state.run.nodes: state for state in SizeSurvey(RunSurvey(context)).look(scaling)}
    wanted = [size for size in asked.sizes if size not in known or (again and known[size].has_failed)]
    plans = plan_sizes(asked, wanted)
    for note in notes_of(asked, plans) if plans else ():
        context.tell(note)
    if asked.runs_at_once:
        scaling, plans = _submit(context, scaling, plans), []
    return _follow(context, scaling, plans, output)


def _submit(context: Context, scaling: "Scaling", plans: "list[SizePlan]") -> "Scaling":
    from llmctl.operate.scale.measure import start

    for number, each in enumerate(plans):
        try:
            scaling = start(context, scaling, each)
        except BaseException:
            if number:
                context.tell(f"submitted: {', '.join(plan.plan.record.name for plan in plans[:number])}")
                context.tell("the same command again submits the others only")
            raise
    return scaling


def _follow(context: Context, scaling: "Scaling", waiting: "list[SizePlan] | tuple[()]", output: "_Output") -> int:
    """Print rows as they come, until all runs have ended."""
    from llmctl.operate.scale.measure import follow

    states: list[SizeState] = []
    try:
        for states in follow(context, scaling, waiting):
            output.add(scaling, states)
    except KeyboardInterrupt:
        left = "" if not waiting else "; sizes that have not begun are submitted by the same command again"
        context.tell(
            f"\nno longer waiting; the runs go on{left}\n"
            f"wait again: llmctl scale {scaling.name} --follow   end a run: llmctl cancel {scaling.name}-Nn"
        )
        return INTERRUPTED
    output.finish(scaling, states)
    failed = [state for state in states if state.has_failed]
    if failed:
        seen = f"see: llmctl logs {failed[0].run.run_id}; --again runs failed sizes again"
        raise FollowedRunFailed("\n".join([*_reasons(failed), seen]))
    return 0


def _reasons(failed: "list[SizeState]") -> list[str]:
    return [f"{state.run.run_id} {state.summary}" for state in failed]


class _Output:
    """Standard output and the picture."""

    def __init__(self, context: Context, *, as_json: bool, svg: Path | None) -> None:
        self.as_json = as_json
        self._context, self._svg = context, svg
        self._rows = 0
        self._said: dict[str, str] = {}

    def add(self, scaling: "Scaling", states: "list[SizeState]") -> None:
        """Tell new states, and print the rows of sizes that have ended, as far as no smaller size is still going."""
        for state in states:
            word = "" if state.state is None or state.state.is_finished else state.state.value
            if word and self._said.get(state.run.run_id) != word:
                self._said[state.run.run_id] = word
                self._context.tell(f"{scaling.name}-{state.run.nodes}n: {word}")
        ended = 0
        while ended < len(states) and states[ended].state is not None and not states[ended].is_going:
            ended += 1
        self._print(scaling, states, ended)

    def show(self, scaling: "Scaling", states: "list[SizeState]") -> None:
        """Print the rows of all sizes."""
        self._print(scaling, states, len(states))

    def finish(self, scaling: "Scaling", states: "list[SizeState]") -> None:
        """Print the document, or the plot on a terminal; write the picture."""
        from llmctl.operate.scale.table import document_of, rows_of

        if self.as_json:
            print_json(document_of(scaling, states))
        else:
            from llmctl.cli.planning.scale_table import print_plot

            print_plot(rows_of(states), self._context)
        if self._svg is not None:
            self._draw(scaling, states)

    def _print(self, scaling: "Scaling", states: "list[SizeState]", end: int) -> None:
        if self.as_json or end <= self._rows:
            return
        from llmctl.cli.planning.scale_table import measured_lines

        lines = measured_lines(scaling.name, states)
        for line in lines[self._rows and self._rows + 1 : end + 1]:
            print(line, flush=True)
        self._rows = end

    def _draw(self, scaling: "Scaling", states: "list[SizeState]") -> None:
        from llmctl.operate.scale.drawing import svg_of
        from llmctl.operate.scale.table import rows_of

        assert self._svg is not None
        kind = "weak" if scaling.is_weak else "strong"
        title = f"{scaling.name} on {scaling.cluster}, {kind} scaling"
        write_file(self._svg, "--svg", svg_of(title, rows_of(states)))
