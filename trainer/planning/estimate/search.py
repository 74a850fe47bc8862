"""Search of the layouts of a model on a number of devices, fastest first. Torch-free.

Every candidate has a lower bound of its time: the work of a mean stage without bubble or messages between stages.
Candidates are planned in the order of their bounds, until no bound beats the last row of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.errors import ConfigError
from trainer.planning.estimate.activations import element_bytes
from trainer.planning.estimate.plan import RunPlan, changed, plan_run
from trainer.planning.estimate.speed import Links, layer_seconds
from trainer.planning.flops import count_parameters
from trainer.planning.layouts import divisors_of
from trainer.planning.schedule.placement import ScheduleError

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.planning.estimate.devices import Device

ROWS = 10
MOST_PLANS = 80
"""Candidates planned in full: a bound on the time of the search."""
_MOST_STAGES = 64
_RECOMPUTES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {"training.recompute_granularity": None, "training.recompute_method": None}),
    ("full", {"training.recompute_granularity": "full", "training.recompute_method": "uniform"}),
)
_LAYOUT_KEYS = (
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)


@dataclass(frozen=True)
class Found:
    """A layout that fits, with its plan."""

    words: str
    plan: RunPlan


@dataclass(frozen=True)
class _Candidate:
    bound: float
    words: str
    values: dict[str, Any]


def search_layouts(config: TrainConfig, vocab_size: int, device: Device, nodes: int, per_node: int) -> list[Found]:
    """The fastest layouts that fit, at most ROWS; empty if none does."""
    candidates = sorted(_candidates(config, vocab_size, device, nodes, per_node), key=lambda each: each.bound)
    found: list[Found] = []
    planned = 0
    for candidate in candidates:
        if planned == MOST_PLANS or (len(found) == ROWS and candidate.bound > found[-1].plan.step.total):
            break
        try:
            plan = plan_run(changed(config, candidate.values), vocab_size, device, nodes, per_node)
        except (ConfigError, ScheduleError):
            continue
        planned += 1
        if plan.fits:
            found.append(Found(candidate.words, plan))
            found = sorted(found, key=lambda each: each.plan.step.total)[:ROWS]
    return found


def _candidates(
    config: TrainConfig, vocab_size: int, device: Device, nodes: int, per_node: int
) -> Iterator[_Candidate]:
    world, model = nodes * per_node, config.model
    counts = count_parameters(config, vocab_size)
    links = Links(per_node, device)
    for tp, cp, pp, ep in _sizes(config, world, per_node):
        dp = world // (tp * cp * pp)
        batch = config.global_batch_size(dp)
        # A layout must fit the other batches of a ramp or of steps too.
        sizes = [phase.samples for phase in config.batch_sizes(dp).phases]
        if any(size % dp for size in sizes):
            continue
        shared = counts.layers if ep == 1 else counts.layers / ep
        # Weights in two bytes and gradients in four, or all of it sharded by ZeRO-3.
        least = (shared + counts.output_layer) / (tp * pp)
        stages = [0, 1] if least * (element_bytes(config) + 4) < device.memory else []
        stages = [1, 3] if dp * cp > 1 and stages else stages or ([3] if dp * cp > 1 else [])
        for mbs in (1, 2, 4, 8):
            if any(size % (dp * mbs) for size in sizes):
                continue
            base: dict[str, Any] = {
                **{f"parallel.{key}": None for key in _LAYOUT_KEYS},
                "parallel.tensor_model_parallel_size": tp,
                "parallel.sequence_parallel": tp > 1,
                "parallel.context_parallel_size": cp,
                "parallel.pipeline_model_parallel_size": pp,
                "parallel.expert_model_parallel_size": ep,
                "parallel.use_distributed_optimizer": False,
                "training.micro_batch_size": mbs,
                "training.recompute_modules": [],
                "training.recompute_num_layers": None,
            }
            for name, recompute in _RECOMPUTES:
                try:
                    forward, backward = layer_seconds(changed(config, {**base, **recompute}), 0, links)
                except ConfigError:
                    continue
                each = forward + backward + (forward if name == "full" else 0.0)
                micro_batches = batch // dp // mbs
                for schedule, chunks in _schedules(pp, model.num_layers, micro_batches):
                    bubble = (pp - 1) / chunks if schedule != "zb-v" else 0
                    bound = each * model.num_layers / pp * (micro_batches + bubble)
                    for stage in stages:
                        yield _Candidate(
                            bound,
                            f"tp {tp} pp {pp} cp {cp} ep {ep} dp {dp}, {schedule}"
                            f"{f' x{chunks}' if chunks > 1 else ''}, ZeRO-{stage}, mbs {mbs}, recompute {name}",
                            {**base, **recompute, **_pipeline(schedule, chunks), **_sharding(stage)},
                        )


def _sizes(config: TrainConfig, world: int, per_node: int) -> Iterator[tuple[int, int, int, int]]:
    """tp, cp, pp and ep that divide the devices and the model."""
    model, length = config.model, config.training.seq_length
    experts = divisors_of(model.num_experts) if model.num_experts else [1]
    contexts = [1, *(cp for cp in (2, 4, 8, 16) if length // cp >= 4096)]
    for tp in (size for size in divisors_of(per_node) if model.num_attention_heads % size == 0):
        for cp in contexts:
            for pp in (size for size in range(1, min(_MOST_STAGES, model.num_layers) + 1)):
                if world % (tp * cp * pp):
                    continue
                for ep in experts:
                    if world // (tp * pp) % ep == 0:
                        yield tp, cp, pp, ep


def _schedules(pp: int, layers: int, micro_batches: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("1f1b", 1)]
    chunked = [("interleaved", chunks) for chunks in (2, 4) if layers >= pp * chunks and micro_batches >= pp]
    return [("1f1b", 1), *chunked, *([("zb-v", 2)] if layers >= 2 * pp else [])]


def _pipeline(schedule: str, chunks: int) -> dict[str, Any]:
    return {
        "parallel.pipeline_schedule": schedule,
        "parallel.num_virtual_stages_per_pipeline_rank": chunks if schedule == "interleaved" else None,
    }


def _sharding(stage: int) -> dict[str, Any]:
    names = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    return {"parallel.data_parallel_sharding_strategy": names[stage]}
