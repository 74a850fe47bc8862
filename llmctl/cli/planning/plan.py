"""``llmctl plan``: memory, speed and cost of a training run, before anything is queued."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.console import print_json
from llmctl.context import Context
from llmctl.errors import ConfigFileError, UsageError

if TYPE_CHECKING:
    from trainer.planning.estimate.plan import RunPlan

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def plan(
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
        int | None, typer.Option("--gpus-per-node", metavar="N", min=1, help="Devices per node.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Device by name, such as H100, instead of a cluster's.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the config. Repeatable.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Rank the layouts for this number of devices.")] = False,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --search: write the best layout as a config.")
    ] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Write the timeline as a picture.")] = None,
    calibrates: Annotated[
        bool,
        typer.Option("--calibrate", help="Fit the predictions for a cluster to your runs there, and keep the fit."),
    ] = False,
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Predict as if the cluster had no calibration.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Predict memory, speed and cost of a training run; exits with 1 if it does not fit."""
    if calibrates:
        others = (config, nodes, gpus_per_node, device, settings, search, output, svg, uncalibrated)
        if any(others):
            raise UsageError("--calibrate: takes your runs on a cluster; leave all but --cluster and --json out")
        from llmctl.cli.planning.calibration import show_calibration

        return show_calibration(ctx.obj, cluster, as_json=as_json)
    if output is not None and not search:
        raise UsageError("--output: goes with --search; add that, or leave it out")
    if svg is not None and search:
        raise UsageError("--svg: draws one layout; leave --search out")
    context: Context = ctx.obj
    from llmctl.submit.preview.predict import plan_inputs, predict

    inputs = plan_inputs(
        context,
        config,
        cluster=cluster,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        device=device,
        settings=tuple(settings or ()),
        calibrates=not uncalibrated,
    )
    if search:
        from llmctl.cli.planning.search import show_search

        return show_search(inputs, output, as_json=as_json)
    planned, prediction = predict(inputs)
    if svg is not None:
        _write_svg(planned, Path(svg))
    if as_json:
        print_json(prediction.as_json())
    else:
        from llmctl.cli.planning.prediction import show_prediction

        show_prediction(planned, inputs, prediction)
    return 0 if planned.fits else 1


def _write_svg(planned: "RunPlan", path: Path) -> None:
    from trainer.planning.schedule.draw import Drawing, DrawingError, svg

    try:
        path.write_text(svg(Drawing(planned.schedule, planned.step.times, "Predicted step")), encoding="utf-8")
    except (OSError, DrawingError) as error:
        raise ConfigFileError(f"--svg {path}: cannot be written: {error}") from None
