"""``llmctl plan``: memory, speed and cost of a training run, before anything is queued."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.console import print_json
from llmctl.context import Context, say
from llmctl.errors import ConfigFileError, UsageError

if TYPE_CHECKING:
    from llmctl.site.profile import ResourceType
    from trainer.config.train_config import TrainConfig
    from trainer.planning.estimate.devices import Device
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Predict memory, speed and cost of a training run; exits with 1 if it does not fit."""
    if output is not None and not search:
        raise UsageError("--output: goes with --search; add that, or leave it out")
    context: Context = ctx.obj
    from trainer.config.errors import ConfigError

    training, base = _training_config(context, config, settings or [])
    vocabulary = _vocabulary(training, base)
    count = nodes or training.job.nodes
    found, per_node, resource, unit = _hardware(context, cluster, device, gpus_per_node, count, training)
    from trainer.planning.estimate.plan import plan_run

    try:
        if search:
            return _search(training, vocabulary, found, count, per_node, output)
        planned = plan_run(training, vocabulary, found, count, per_node)
    except ConfigError as error:
        raise ConfigFileError(f"{error.key}: {error.problem}") from None
    hours = planned.step.total * training.training.train_iters * count / 3600
    points = None if resource is None or resource.points_per_hour is None else resource.points_per_hour * hours
    cost = None if points is None else {"points": points, "unit": unit}
    if svg is not None:
        _write_svg(planned, Path(svg))
    if as_json:
        print_json(_document(planned, hours, cost))
    else:
        from llmctl.cli.planning.prediction import show_prediction

        show_prediction(planned, hours, cost, (count, per_node))
    return 0 if planned.fits else 1


def _training_config(context: Context, config: str | None, settings: list[str]) -> "tuple[TrainConfig, Path]":
    """The config, and the folder that its relative paths are below."""
    from llmctl.site.profile import overlay
    from llmctl.submit.config_file import find_config
    from llmctl.submit.resolve import parse_settings
    from trainer.config.errors import ConfigError
    from trainer.config.yaml_file import read_yaml
    from trainer.planning.build_config import build_config

    path, note = find_config(context, config)
    if note:
        context.tell(note)
    try:
        values: dict[str, Any] = read_yaml(path)
        for flag in parse_settings(settings):
            nested: Any = flag.value
            for part in reversed(flag.key.split(".")):
                nested = {part: nested}
            values = overlay(values, nested)
        return build_config(_over_start_model(values, path.parent)), path.parent
    except ConfigError as error:
        raise ConfigFileError(f"{path}: {error.key}: {error.problem}".replace(": : ", ": ")) from None


def _vocabulary(config: "TrainConfig", base: Path) -> int:
    """Token ids of the run: of the config, else of the data or the tokenizer that it names on this machine."""
    from trainer.planning.estimate.known_sizes import dataset_size, vocabulary_of
    from trainer.planning.start_model import LocalFiles

    files = LocalFiles(base)
    found = vocabulary_of(config, dataset_size(config, files), files)
    if found is None:
        raise UsageError(
            "model.vocab_size: is unset, and no data or tokenizer of the config that can be read here says it; add "
            "--set model.vocab_size=N"
        )
    return found


def _over_start_model(values: Mapping[str, Any], base: Path) -> Mapping[str, Any]:
    """The values, laid over the model of a folder on this machine that they name, if any."""
    from trainer.planning.build_config import names_start

    if not names_start(values):
        return values
    from trainer.planning.start_model import FROM, LocalFiles, completed

    values = {**values}
    for section, key in (("checkpoint", "load"), ("model", FROM)):
        named = values.get(section)
        if isinstance(named, dict) and isinstance(named.get(key), str):
            values[section] = {**named, key: str(base / Path(named[key]).expanduser())}
    return completed(values, LocalFiles())


def _hardware(
    context: Context,
    cluster: str | None,
    device: str | None,
    gpus_per_node: int | None,
    nodes: int,
    config: "TrainConfig",
) -> "tuple[Device, int, ResourceType | None, str]":
    """The device, the devices of a node, and the kind of node with the unit of its cost."""
    from trainer.planning.estimate.devices import DEVICES, find_device

    known = f"the devices are {', '.join(DEVICES)}"
    if device is not None:
        if cluster is not None:
            raise UsageError("--device: names the hardware, as --cluster does; leave one of them out")
        found = find_device(device)
        if found is None:
            raise UsageError(f"--device {device}: is unknown; {known}")
        return found, gpus_per_node or config.job.gpus_per_node or 8, None, ""
    name, origin = context.cluster(cluster)
    profile = context.profile(name, origin)
    if context.backend(profile).capabilities.starts_in_place:
        here, per_node = _this_machine(context, gpus_per_node or config.job.gpus_per_node, nodes, config)
        return here, per_node, None, ""
    kind = config.job.resource_type or profile.defaults.resource_type
    kind = kind or next((key for key, each in profile.resource_types.items() if each.gpus), None)
    resource = profile.resource_types.get(kind or "")
    if resource is None or resource.gpu is None:
        raise UsageError(f"--cluster {name}: its profile names no GPU (resource_types: gpu); use --device; {known}")
    found = find_device(resource.gpu, resource.gpu_memory_gib)
    if found is None:
        raise UsageError(f"--cluster {name}: its GPU {resource.gpu} is unknown; use --device; {known}")
    per_node = gpus_per_node or config.job.gpus_per_node or resource.gpus or 1
    return found, per_node, resource, profile.cost.unit


def _this_machine(
    context: Context, gpus_per_node: int | None, nodes: int, config: "TrainConfig"
) -> "tuple[Device, int]":
    """The GPU or CPU of this machine, and the ranks of each group of processes that stands for a node."""
    from llmctl.submit.preview.estimate import device_here
    from llmctl.submit.visible_gpus import visible_gpus

    gpus = () if config.training.device == "cpu" else visible_gpus(context)
    per_node = gpus_per_node or max(1, len(gpus) // nodes)
    found = device_here(context.transport, has_gpus=bool(gpus), ranks=nodes * per_node)
    if found is None:
        raise UsageError("--cluster local: the GPU of this machine is unknown; use --device")
    return found, per_node


def _document(planned: "RunPlan", hours: float, cost: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "fits": planned.fits,
        "why_not": planned.why_not,
        "memory_bytes": planned.worst.bytes_of,
        "peak_memory_bytes": planned.worst.total,
        "iteration_time_s": planned.step.total,
        "tokens_per_s_per_device": planned.tokens_per_s,
        "tflops_per_device": planned.tflops,
        "bubble_fraction": planned.step.times.bubble_fraction,
        "node_hours": hours,
        "cost": cost,
    }


def _write_svg(planned: "RunPlan", path: Path) -> None:
    from trainer.planning.schedule.draw import Drawing, DrawingError, svg

    try:
        path.write_text(svg(Drawing(planned.schedule, planned.step.times, "Predicted step")), encoding="utf-8")
    except (OSError, DrawingError) as error:
        raise ConfigFileError(f"--svg {path}: cannot be written: {error}") from None


def _search(
    config: "TrainConfig", vocabulary: int, device: "Device", nodes: int, per_node: int, output: str | None
) -> int:
    from trainer.planning.estimate.devices import GIB
    from trainer.planning.estimate.search import search_layouts

    found = search_layouts(config, vocabulary, device, nodes, per_node)
    if not found:
        say(f"no layout fits on {nodes} x {per_node} {device.name}")
        return 1
    print(f"{'TOKENS/S':>10}  {'STEP S':>8}  {'GIB':>6}  {'BUBBLE':>6}  LAYOUT")
    for each in found:
        planned = each.plan
        bubble = f"{100 * planned.step.times.bubble_fraction:.1f}%"
        print(
            f"{planned.tokens_per_s:>10,.0f}  {planned.step.total:>8.3g}  {planned.worst.total / GIB:>6.1f}  "
            f"{bubble:>6}  {each.words}"
        )
    if output is not None:
        import yaml

        plain = found[0].plan.config.model_dump(exclude_unset=True, mode="json")
        try:
            Path(output).write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
        except OSError as error:
            raise ConfigFileError(f"--output {output}: cannot be written: {error.strerror}") from None
        say(f"best layout: {output}")
    return 0
