"""Memory, speed and cost of a training run, predicted from its config and the hardware by name."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from llmctl.context import Context
from llmctl.errors import ConfigFileError, UsageError
from llmctl.site.profile import ResourceType, overlay
from llmctl.submit.config_file import FROM_PYTHON, find_config
from llmctl.submit.preview.calibration import KnownDevice, known_device
from llmctl.submit.preview.estimate import device_here
from llmctl.submit.resolve import parse_settings
from llmctl.submit.visible_gpus import visible_gpus
from trainer.config.errors import ConfigError
from trainer.config.paths.variables import names_in, replace_variables, unset_problem
from trainer.config.train_config import TrainConfig
from trainer.config.yaml_file import read_yaml
from trainer.planning.build_config import build_config, names_start
from trainer.planning.estimate.devices import DEVICES, Device, find_device
from trainer.planning.estimate.known_sizes import dataset_size, vocabulary_of
from trainer.planning.estimate.plan import RunPlan, plan_run
from trainer.planning.start_model import FROM, LocalFiles, completed


@dataclass(frozen=True)
class PlanInputs:
    """Inputs of a prediction.

    Attributes:
        training: the config.
        vocabulary: number of token ids.
        device: of each rank.
        nodes: number of nodes.
        gpus_per_node: devices of each node.
        resource: kind of node, with its rate; None: the nodes cost none.
        unit: of the cost.
        known: the device with what is known of its speed; None: its data sheet alone.
    """

    training: TrainConfig
    vocabulary: int
    device: Device
    nodes: int
    gpus_per_node: int
    resource: ResourceType | None
    unit: str
    known: KnownDevice | None


class PredictedCost(TypedDict):
    """Charge of a whole run."""

    points: float
    """Charge, in the site's unit."""
    unit: str
    """Unit of the points."""


@dataclass(frozen=True)
class Prediction:
    """Predicted memory, speed and cost of a training run.

    Attributes:
        fits: True if no rank needs more memory than its device has.
        why_not: the reason, as a sentence; None if the run fits.
        memory_bytes: item -> bytes, of the rank with the highest peak.
        peak_memory_bytes: their sum.
        iteration_time_s: seconds per iteration.
        tokens_per_s_per_device: tokens per second and device.
        tflops_per_device: TFLOP/s, with the attention of all pairs of tokens.
        bubble_fraction: share of the time in which a pipeline rank waits for another.
        node_hours: node-hours of the whole run.
        cost: of the whole run; None: the nodes cost none.
        limits: share of the iteration: bubble, messages (of tp, cp, ep), recompute, data_parallel, host, optimizer.
        remarks: sentences on a run that is tight, or much slower on this hardware than with other choices.
        tight: True if the run fits, but with less room than predictions are wrong by.
        calibrated_by: number of runs that the prediction was calibrated by; 0: none.
        measured: time of the measurement of the hardware, as ISO 8601; None: its speeds are those of the data sheet.
    """

    fits: bool
    why_not: str | None
    memory_bytes: Mapping[str, int]
    peak_memory_bytes: int
    iteration_time_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    bubble_fraction: float
    node_hours: float
    cost: PredictedCost | None
    limits: Mapping[str, float]
    remarks: Sequence[str]
    tight: bool
    calibrated_by: int
    measured: str | None

    def as_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def plan_inputs(
    context: Context,
    config: str | Mapping[str, Any] | None,
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    device: str | None = None,
    settings: Sequence[str] | Mapping[str, Any] = (),
    calibrates: bool = True,
) -> PlanInputs:
    """Read the config and find the hardware. Contacts no other machine.

    Args:
        context: this call of llmctl.
        config: file as typed, or the sections themselves; None: as for submit.
        cluster: as typed; None without --cluster.
        nodes: None: of the config.
        gpus_per_node: devices of each node; None: of the config, or the node's.
        device: a device by name, instead of a cluster's.
        settings: ``key=value`` of every --set; or values by dotted key.
        calibrates: use the calibration and the measured hardware of the cluster, if there are any.

    Raises:
        UsageError, ConfigFileError, ProfileError: by flag, file and key, or profile.
    """
    training, base = _training_config(context, config, settings)
    vocabulary = _vocabulary(training, base)
    count = nodes or training.job.nodes
    found, per_node, resource, unit = _hardware(context, cluster, device, gpus_per_node, count, training)
    known = None
    if calibrates and device is None:
        known = known_device(context.folders, context.cluster(cluster)[0], found)
        found = known.device
    return PlanInputs(training, vocabulary, found, count, per_node, resource, unit, known)


def predict(inputs: PlanInputs) -> tuple[RunPlan, Prediction]:
    """Predict a run.

    Raises:
        ConfigFileError: the config does not go with this number of devices.
    """
    try:
        planned = plan_run(inputs.training, inputs.vocabulary, inputs.device, inputs.nodes, inputs.gpus_per_node)
    except ConfigError as error:
        raise config_error(error) from None
    hours, cost = charge(inputs, planned)
    known = inputs.known
    return planned, Prediction(
        fits=planned.fits,
        why_not=planned.why_not,
        memory_bytes=planned.worst.bytes_of,
        peak_memory_bytes=planned.worst.total,
        iteration_time_s=planned.step.total,
        tokens_per_s_per_device=planned.tokens_per_s,
        tflops_per_device=planned.tflops,
        bubble_fraction=planned.step.times.bubble_fraction,
        node_hours=hours,
        cost=cost,
        limits=planned.limits,
        remarks=planned.remarks,
        tight=planned.is_tight,
        calibrated_by=len(known.calibration.runs) if known is not None and known.calibration is not None else 0,
        measured=known.hardware["date"] if known is not None and known.hardware is not None else None,
    )


def charge(inputs: PlanInputs, planned: RunPlan) -> tuple[float, PredictedCost | None]:
    """Node-hours of the whole run, and its cost; None: the nodes cost none."""
    hours = planned.step.total * planned.config.full_iters * inputs.nodes / 3600
    rate = None if inputs.resource is None else inputs.resource.points_per_hour
    return hours, None if rate is None else {"points": rate * hours, "unit": inputs.unit}


def config_error(error: ConfigError) -> ConfigFileError:
    """The error of a config that does not go with the hardware."""
    return ConfigFileError(str(error))


def _training_config(
    context: Context, config: str | Mapping[str, Any] | None, settings: Sequence[str] | Mapping[str, Any]
) -> tuple[TrainConfig, Path]:
    """The config, and the folder that its relative paths are below."""
    if isinstance(config, Mapping):
        source, base, note = FROM_PYTHON, context.cwd, ""
    else:
        path, note = find_config(context, config)
        source, base = str(path), path.parent
    if note:
        context.tell(note)
    try:
        values: Mapping[str, Any] = config if isinstance(config, Mapping) else read_yaml(path)
        for flag in parse_settings(settings):
            nested: Any = flag.value
            for part in reversed(flag.key.split(".")):
                nested = {part: nested}
            values = overlay(values, nested)
        values = replace_variables(values, context.environment)
        return build_config(_over_start_model(values, base)), base
    except ConfigError as error:
        raise ConfigFileError(f"{source}: {error}") from None


def _vocabulary(config: TrainConfig, base: Path) -> int:
    """Token ids of the run: of the config, else of the data or the tokenizer that it names on this machine."""
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
    if not names_start(values):
        return values
    values = {**values}
    for section, key in (("checkpoint", "load"), ("model", FROM)):
        named = values.get(section)
        if isinstance(named, dict) and isinstance(named.get(key), str):
            if left := names_in(named[key]):
                raise ConfigError(f"{section}.{key}", unset_problem(left, "this machine"))
            values[section] = {**named, key: str(base / Path(named[key]).expanduser())}
    return completed(values, LocalFiles())


def _hardware(
    context: Context,
    cluster: str | None,
    device: str | None,
    gpus_per_node: int | None,
    nodes: int,
    config: TrainConfig,
) -> tuple[Device, int, ResourceType | None, str]:
    """The device, the devices of a node, and the kind of node with the unit of its cost."""
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


def _this_machine(context: Context, gpus_per_node: int | None, nodes: int, config: TrainConfig) -> tuple[Device, int]:
    """The GPU or CPU of this machine, and the ranks of each group of processes that stands for a node."""
    gpus = () if config.training.device == "cpu" else visible_gpus(context)
    per_node = gpus_per_node or max(1, len(gpus) // nodes)
    found = device_here(context.transport, has_gpus=bool(gpus), ranks=nodes * per_node)
    if found is None:
        raise UsageError("--cluster local: the GPU of this machine is unknown; use --device")
    return found, per_node
