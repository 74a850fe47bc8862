"""Layouts of a model on a number of devices, each with lower bounds of its time and its memory. Torch-free.

Bounds are arithmetic on a mean stage, about a thousand times cheaper than a plan: no table is built or played.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.planning.estimate.activations import stage_bytes
from trainer.planning.estimate.layer_time import head_seconds, host_seconds, layer_time
from trainer.planning.estimate.links import Links
from trainer.planning.estimate.memory import communication_bytes, state_bytes
from trainer.planning.estimate.parameters import RankParameters, layer_parameters
from trainer.planning.estimate.speed import Hidden, exposed_seconds, optimizer_seconds
from trainer.planning.layouts import divisors_of
from trainer.planning.parts import block, embedding
from trainer.planning.parts.attention import keeps_scores

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

_MOST_STAGES = 64
_CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SAFE = 0.95
"""The first rank of a pipeline has up to a layer less than the mean, which balances its embedding."""
_LARGEST = 1.25
"""Largest stage in mean stages, for the bounds."""
_SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_UNSET: dict[str, Any] = {
    "parallel.num_layers_per_virtual_pipeline_stage": None,
    "parallel.decoder_first_pipeline_num_layers": None,
    "parallel.decoder_last_pipeline_num_layers": None,
    "parallel.pipeline_model_parallel_layout": None,
    "parallel.use_distributed_optimizer": False,
    "training.recompute_num_layers": None,
}
"""Keys of another layout that the config may have."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of tensor, context, pipeline, expert and data parallelism; ``whole``: tp does not divide an expert."""

    tp: int
    cp: int
    pp: int
    ep: int
    dp: int
    whole: bool = False

    def __str__(self) -> str:
        more = f" cp {self.cp}" if self.cp > 1 else ""
        more += f" ep {self.ep}" if self.ep > 1 else ""
        more += " whole experts" if self.whole else ""
        return f"tp {self.tp} pp {self.pp}{more} dp {self.dp}"


@dataclass(frozen=True)
class Candidate:
    """A layout with its lower bounds.

    Attributes:
        seconds: of an iteration, at least.
        bytes: of the rank with the highest peak, at least.
        mesh: sizes of the parallel groups.
        table: schedule, virtual stages and micro batch.
        words: what else the layout has.
        values: dotted keys of the config.
        rank: order among layouts of equal time, the simplest first.
    """

    seconds: float
    bytes: float
    mesh: Mesh
    table: str
    words: str
    values: dict[str, Any]
    rank: int

    def __str__(self) -> str:
        return ", ".join(filter(None, (str(self.mesh), self.table, self.words)))

    @property
    def twins(self) -> tuple[Mesh, str, bool]:
        """Equal for layouts of which the first that fits is the fastest: their times differ as their bounds do."""
        return self.mesh, self.table, self.rank == 3


def unchecked(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    """``config`` with dotted keys set, as they are; a candidate is checked only when it is planned."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    update = {section: getattr(config, section).model_copy(update=own) for section, own in sections.items()}
    return config.model_copy(update=update)


def fixed_batch(config: TrainConfig, world: int) -> dict[str, Any]:
    """The key that keeps the batch of ``config`` on ``world`` devices; empty if the config names its batch.

    An unset batch is one micro-batch of each replica: layouts would have different batches, and the one with the
    smallest would seem the fastest.
    """
    training = config.training
    if training.global_batch_size is not None or training.step_batch_size_schedule is not None:
        return {}
    return {"training.global_batch_size": config.global_batch_size(max(1, config.data_parallel_size(world)))}


def candidates(config: TrainConfig, vocab_size: int, links: Links, world: int) -> Iterator[Candidate]:
    """All layouts of ``world`` devices that the search knows, all with the batch of the config's own layout."""
    fixed = fixed_batch(config, world)
    config = unchecked(config, fixed)
    for mesh in _meshes(config, world, links.per_node):
        # A layout must fit the other batches of a ramp or of steps too.
        sizes = [phase.samples for phase in config.batch_sizes(mesh.dp).phases]
        for mbs in _MICRO_BATCHES:
            if any(size % (mesh.dp * mbs) for size in sizes):
                continue
            for recompute, keys in _recomputes(config):
                values = {**_UNSET, **fixed, **_mesh_keys(mesh), **keys, "training.micro_batch_size": mbs}
                yield from _Bounds(config, vocab_size, links, world, mesh, values).candidates(max(sizes), recompute)


class _Bounds:
    """Bounds of the layouts that differ in schedule and sharding alone."""

    def __init__(
        self, config: TrainConfig, vocab_size: int, links: Links, world: int, mesh: Mesh, values: dict[str, Any]
    ) -> None:
        self.mesh, self.values, self.links, self.world = mesh, values, links, world
        self.config = config = unchecked(config, values)
        model = config.model
        kinds = [(len(layers), layers[0]) for layers in block.by_kind(model).values()]
        times = [(count, layer_time(config, layer, links)) for count, layer in kinds]
        self.forward = sum(count * time.forward for count, time in times)
        self.backward = sum(count * time.backward for count, time in times)
        self.of_head = 3 * head_seconds(config, vocab_size, links.device)
        host = model.num_layers * sum(host_seconds(config, links.device))
        self.of_micro_batch = max(self.forward + self.backward + self.of_head, host)
        parameters = [(count, layer_parameters(config, layer)) for count, layer in kinds]
        dense, experts = (sum(count * each[part] for count, each in parameters) for part in (0, 1))
        share = self._least_layers() / model.num_layers
        table = model.padded_vocab_size(vocab_size, mesh.tp) // mesh.tp * embedding.word_width(model)
        unit = max(sum(each) for _, each in parameters)
        self.first = RankParameters(int(dense * share) + table, int(experts * share), max(table, unit))
        self.inner = RankParameters(int(dense * share), int(experts * share), unit)
        self.kept = stage_bytes(config, range(self._least_layers()))
        self.overhead = links.device.overhead
        self.others = self.overhead.runtime + communication_bytes(config, world, self.overhead)

    def _least_layers(self) -> int:
        """Layers of the rank with the most layers, at least."""
        return max(1, self.config.model.num_layers // self.mesh.pp)

    def _hidden(self, chunks: int) -> Hidden:
        """At most: a virtual stage, a quarter larger than the mean, and the head."""
        of_stage = _LARGEST / self.mesh.pp / chunks
        # The host may need longer than the device.
        forward, backward = host_seconds(self.config, self.links.device)
        layers = self.config.model.num_layers
        return Hidden(
            of_stage * max(self.forward, layers * forward) + self.of_head,
            of_stage * max(self.backward, layers * backward) + self.of_head,
        )

    def candidates(self, batch: int, recompute: str) -> Iterator[Candidate]:
        """The layouts of a batch of ``batch`` samples; ``recompute``: words of what they compute again."""
        mesh, device, layers = self.mesh, self.links.device, self.config.model.num_layers
        count = batch // mesh.dp // self.values["training.micro_batch_size"]
        copies = mesh.dp * mesh.cp
        for schedule, chunks in _schedules(mesh.pp, layers, count):
            bubble = {"1f1b": mesh.pp - 1, "interleaved": (mesh.pp - 1) / chunks}.get(schedule, 0)
            seconds = self.of_micro_batch / mesh.pp * count + (self.forward + self.backward) / mesh.pp * bubble
            hidden = self._hidden(chunks)
            # With zb-v the first rank has the head too, and so fewer layers than the others.
            parameters = self.inner if schedule == "zb-v" else self.first
            kept = self.kept[0] * _in_flight(schedule, mesh.pp, chunks, count) + self.kept[1]
            kept *= 1 + self.overhead.fragments
            table = f"{schedule}{f' x{chunks}' if chunks > 1 else ''}, " if mesh.pp > 1 else ""
            table += f"mbs {self.values['training.micro_batch_size']}"
            for stage in range(4) if copies > 1 else (0,):
                # On a CPU device all states are in its memory.
                for offload in (False, True) if stage < 2 and device.host else (False,):
                    values = {
                        **self.values,
                        "parallel.pipeline_schedule": schedule,
                        "parallel.num_virtual_stages_per_pipeline_rank": chunks if schedule == "interleaved" else None,
                        "parallel.data_parallel_sharding_strategy": _SHARDING[stage],
                        "optimizer.optimizer_cpu_offload": offload,
                    }
                    own = unchecked(self.config, values)
                    updated = parameters.shard(own, self.world) if stage else parameters.total
                    words = [f"ZeRO-{stage}"] if copies > 1 else []
                    words += [f"recompute {recompute}"] if recompute else []
                    words += ["optimizer in CPU memory"] if offload else []
                    yield Candidate(
                        seconds
                        + optimizer_seconds(own, updated, device)
                        + exposed_seconds(own, parameters, hidden, count, self.world, self.links),
                        _SAFE * (sum(state_bytes(own, parameters, self.world)) + kept + self.others),
                        mesh,
                        table,
                        ", ".join(words),
                        values,
                        stage,
                    )


def _in_flight(schedule: str, pp: int, chunks: int, count: int) -> float:
    """Micro-batches of which the first rank keeps its layers, at the peak of the table."""
    if schedule == "interleaved":
        largest = -(-count // max(1, count // pp))
        return min(count, (2 * (pp - 1) + (chunks - 1) * largest + 1) / chunks)
    return min(count, pp)


def _meshes(config: TrainConfig, world: int, per_node: int) -> Iterator[Mesh]:
    """Sizes that divide the devices and the model."""
    model, length = config.model, config.training.seq_length
    experts = divisors_of(model.num_experts) if model.num_experts else [1]
    contexts = [1, *(cp for cp in (2, 4, 8, 16) if length // cp >= 4096)]
    for tp in (size for size in divisors_of(per_node) if model.num_attention_heads % size == 0):
        for cp in contexts:
            for pp in range(1, min(_MOST_STAGES, model.num_layers) + 1):
                if world % (tp * cp * pp):
                    continue
                dp = world // (tp * cp * pp)
                yield from (Mesh(tp, cp, pp, ep, dp) for ep in experts if dp * cp % ep == 0)
                # On one expert rank they would only be copies.
                wider = (ep for ep in experts if ep > 1 and world // pp % ep == 0) if tp > 1 else ()
                yield from (Mesh(tp, cp, pp, ep, dp, whole=True) for ep in wider)


def _mesh_keys(mesh: Mesh) -> dict[str, Any]:
    return {
        "parallel.tensor_model_parallel_size": mesh.tp,
        "parallel.sequence_parallel": mesh.tp > 1,
        "parallel.context_parallel_size": mesh.cp,
        "parallel.pipeline_model_parallel_size": mesh.pp,
        "parallel.expert_model_parallel_size": mesh.ep,
        "parallel.expert_tensor_parallel_size": 1 if mesh.whole else None,
    }


def _recomputes(config: TrainConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Words and keys of what backward computes again, the cheapest first."""
    model = config.model
    part, act = ("moe", "moe_act") if model.num_experts else ("mlp", "mlp_act")
    yield "", _recompute(None, None, [])
    if keeps_scores(model):
        yield "attention", _recompute("selective", None, ["core_attn"])
    for modules in (["layernorm", act], ["layernorm", part]):
        yield " and ".join(modules), _recompute("selective", None, modules)
    yield "all", _recompute("full", "uniform", [])


def _recompute(granularity: str | None, method: str | None, modules: list[str]) -> dict[str, Any]:
    keys = ("recompute_granularity", "recompute_method", "recompute_modules")
    return {f"training.{key}": value for key, value in zip(keys, (granularity, method, modules), strict=True)}


def _schedules(pp: int, layers: int, micro_batches: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("1f1b", 1)]
    chunked = [("interleaved", chunks) for chunks in _CHUNKS if layers >= pp * chunks and micro_batches >= pp]
    return [("1f1b", 1), *chunked, *([("zb-v", 2)] if layers >= 2 * pp else [])]
