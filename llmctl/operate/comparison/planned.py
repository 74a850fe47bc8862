"""The run that the planner predicts from the record, to stand beside the measured one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.context import ClusterSession, Context
from llmctl.runs.record import RunRecord

if TYPE_CHECKING:
    from trainer.planning.estimate.devices import Device
    from trainer.planning.estimate.plan import RunPlan


@dataclass(frozen=True)
class Planned:
    """A prediction, for ``nodes`` nodes of ``per_node`` devices."""

    plan: "RunPlan"
    nodes: int
    per_node: int


def plan_of(context: Context, session: ClusterSession, record: RunRecord) -> Planned | str | None:
    """The prediction for a run, or the reason why there is none; None for a COMMAND.

    Of files that have gone since, the size of the vocabulary may be unknown.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    if record.config is None:
        return None
    from llmctl.submit.start_model import TransportFiles
    from trainer.config.errors import ConfigError
    from trainer.planning.build_config import build_config
    from trainer.planning.estimate.known_sizes import dataset_size, vocabulary_of
    from trainer.planning.estimate.plan import plan_run
    from trainer.planning.schedule.placement import ScheduleError

    try:
        config = build_config(dict(record.config))
        files = TransportFiles(session.transport, tuple(record.job.get("mounts") or ()))
        vocabulary = vocabulary_of(config, dataset_size(config, files), files)
        if vocabulary is None:
            return "the size of its vocabulary is unknown: its data and tokenizer cannot be read here"
        nodes = int(record.job.get("nodes") or 1)
        per_node, device = _devices(context, session, record, nodes)
        if device is None:
            return "the profile of its cluster names no known GPU"
        return Planned(plan_run(config, vocabulary, device, nodes, per_node), nodes, per_node)
    except ConfigError as error:
        return f"{error.key}: {error.problem}".removeprefix(": ")
    except ScheduleError as error:
        return str(error)


def _devices(context: Context, session: ClusterSession, record: RunRecord, nodes: int) -> "tuple[int, Device | None]":
    """Devices of a node, and their kind; None if unknown."""
    from llmctl.submit.preview.estimate import device_here
    from llmctl.submit.visible_gpus import visible_gpus
    from trainer.planning.estimate.devices import find_device

    profile, asked = session.profile, record.job.get("gpus_per_node")
    per_node = _recorded_ranks(session, record) or asked
    if context.backend(profile).capabilities.starts_in_place:
        per_node = int(per_node or 1)
        device = (record.config or {}).get("training", {}).get("device")
        has_gpus = device != "cpu" and bool(visible_gpus(context))
        return per_node, device_here(session.transport, has_gpus=has_gpus, ranks=nodes * per_node)
    resource = profile.resource_types.get(record.job.get("resource_type") or profile.defaults.resource_type or "")
    if resource is None or resource.gpu is None:
        return int(per_node or 1), None
    return int(per_node or resource.gpus or 1), find_device(resource.gpu, resource.gpu_memory_gib)


def _recorded_ranks(session: ClusterSession, record: RunRecord) -> int | None:
    """Ranks of a node, as the newest submission decided."""
    import json

    from llmctl.transport.file_reads import FileRead

    (part,) = session.transport.read_parts([FileRead(f"{record.run_dir}/job.json")])
    try:
        values = json.loads(part.data) if part is not None else {}
    except ValueError:
        return None
    found = values.get("ranks_per_node") if isinstance(values, dict) else None
    return found if type(found) is int and found > 0 else None
