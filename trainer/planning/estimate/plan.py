"""Plan of a training run: does it fit, how fast, and the smallest change that makes it fit. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.errors import ConfigError
from trainer.planning.build_config import build_config
from trainer.planning.checks import check_world_size
from trainer.planning.estimate.devices import GIB, MARGIN, Device
from trainer.planning.estimate.layer_time import host_seconds, layer_time
from trainer.planning.estimate.links import Links
from trainer.planning.estimate.memory import RankMemory, memory_of_ranks, micro_batches_of, schedule_of
from trainer.planning.estimate.speed import StepTime, step_time
from trainer.planning.flops import flops_per_token
from trainer.planning.layouts import divisors_of
from trainer.planning.parts import block
from trainer.planning.parts.attention import keeps_scores, score_flops

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.planning.schedule import PipelineSchedule


@dataclass(frozen=True)
class Change:
    """One change of the config, in words and as keys with values."""

    words: str
    values: dict[str, Any]


@dataclass(frozen=True)
class RunPlan:
    """Predicted memory and time of a config on a number of devices."""

    config: TrainConfig
    vocab_size: int
    world_size: int
    device: Device
    ranks: list[RankMemory]
    schedule: PipelineSchedule
    step: StepTime
    per_node: int

    @property
    def worst(self) -> RankMemory:
        """Memory of the pipeline rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def fits(self) -> bool:
        """True if no rank needs more than the device has."""
        return self.worst.total <= self.device.memory

    @property
    def is_tight(self) -> bool:
        """True if the run fits, but with less room than predictions are wrong by."""
        return self.fits and self.worst.total * MARGIN > self.device.memory

    @property
    def verdict(self) -> str:
        """Fits, tight, or does not fit."""
        return "tight" if self.is_tight else "fits" if self.fits else "does not fit"

    @property
    def cannot_fit(self) -> bool:
        """True if weights, gradients and optimizer state alone exceed the device, whatever the activations are."""
        return max(rank.states for rank in self.ranks) > self.device.memory

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and device."""
        batch = self.config.global_batch_size(self.config.data_parallel_size(self.world_size))
        return batch * self.config.training.seq_length / self.step.total / self.world_size

    @property
    def tflops(self) -> float:
        """TFLOP/s per device, with the attention of all pairs of tokens (trainer.planning.flops)."""
        return self.tokens_per_s * flops_per_token(self.config, self.vocab_size) / 1e12

    @property
    def utilization(self) -> tuple[float, float]:
        """MFU, counting attention over all pairs of tokens, and over those that the causal mask leaves."""
        model, length = self.config.model, self.config.training.seq_length
        scores = sum(score_flops(model, layer, length) for layer in range(model.num_layers))
        skipped = self.tokens_per_s * scores / 2 / self.device.peak
        full = self.tflops * 1e12 / self.device.peak
        return full, full - skipped

    @property
    def limits(self) -> dict[str, float]:
        """Shares of the step that are not products and attention of one forward and backward.

        bubble: of the mean rank; messages: of tensor, context and expert parallelism; recompute; data_parallel:
        messages that nothing hides; host: for which the device waits, between kernels; optimizer.
        """
        config, step = self.config, self.step
        links = Links(self.per_node, self.device)
        times = [(len(own), layer_time(config, own[0], links)) for own in block.by_kind(config.model).values()]
        passes = micro_batches_of(config, self.world_size) / config.parallel.pipeline_model_parallel_size
        host = host_seconds(config, self.device)
        waits = [
            count * sum(max(0.0, start - own) for start, own in zip(host, (time.forward, time.backward), strict=True))
            for count, time in times
        ]
        return {
            "bubble": step.times.bubble_fraction * step.times.step_time / step.total,
            "messages": passes * sum(count * time.messages for count, time in times) / step.total,
            "recompute": passes * sum(count * time.again for count, time in times) / step.total,
            "data_parallel": step.exposed / step.total,
            "host": passes * sum(waits) / step.total,
            "optimizer": step.optimizer / step.total,
        }

    @property
    def remarks(self) -> list[str]:
        """Sentences on a run that is tight, or much slower on this hardware than with other choices."""
        training, device, tp = self.config.training, self.device, self.config.parallel.tensor_model_parallel_size
        found = []
        if self.is_tight:
            found.append(
                f"tight: {self.worst.total / GIB:.1f} of {device.memory / GIB:.1f} GiB are predicted; no published run "
                f"has failed below {device.memory / MARGIN / GIB:.1f}, and some have above"
            )
        if training.bf16 and not device.has_bf16:
            found.append(
                f"{device.name} has no bf16: products run in float32 at {device.single / 1e12:g} instead of "
                f"{device.peak / 1e12:g} TFLOP/s; use training.fp16 instead of training.bf16"
            )
        elif not training.bf16 and not training.fp16 and device.single < device.peak:
            word = "bf16" if device.has_bf16 else "fp16"
            found.append(
                f"products run in float32 at {device.single / 1e12:g} TFLOP/s; with training.{word} {device.name} "
                f"reaches up to {device.peak / 1e12:g}"
            )
        if tp > self.per_node:
            found.append(
                f"tensor parallelism {tp} leaves a node of {self.per_node} devices, and waits for the slower links "
                "between nodes in every layer"
            )
        return found

    @property
    def why_not(self) -> str | None:
        """Sentence that names the rank, its peak and its largest item; None if the run fits."""
        if self.fits:
            return None
        worst = self.worst
        item = max(worst.bytes_of, key=lambda name: worst.bytes_of[name])
        return (
            f"pipeline rank {worst.pp_rank} needs {worst.total / GIB:.1f} GiB, but {self.device.name} has "
            f"{self.device.memory / GIB:.1f}; its largest item is {item.replace('_', ' ')} with "
            f"{worst.bytes_of[item] / GIB:.1f} GiB"
        )


def plan_run(config: TrainConfig, vocab_size: int, device: Device, nodes: int, per_node: int) -> RunPlan:
    """Plan ``config`` on ``nodes`` nodes with ``per_node`` devices each.

    Raises:
        ConfigError: the layout does not fit the number of devices, or the model is not covered.
    """
    check_covered(config)
    world_size = nodes * per_node
    check_world_size(config, world_size)
    schedule = schedule_of(config, world_size)
    ranks = memory_of_ranks(config, vocab_size, world_size, device.overhead)
    step = step_time(config, vocab_size, world_size, schedule, Links(per_node, device))
    return RunPlan(config, vocab_size, world_size, device, ranks, schedule, step, per_node)


def check_covered(config: TrainConfig) -> None:
    """Refuse a model that has no estimate.

    Raises:
        ConfigError: names the models that have one.
    """
    model = config.model
    if model.architecture != "decoder" or model.multi_latent_attention or model.mtp_num_layers:
        raise ConfigError(
            "model.architecture",
            "has no estimate with bert, t5, multi_latent_attention or mtp_num_layers; plan covers other decoders",
        )


def changed(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    """``config`` with dotted keys set to ``values``, checked again.

    Raises:
        ConfigError: the changed config is not valid.
    """
    plain = config.model_dump(exclude_unset=True)
    for key, value in values.items():
        section, _, name = key.partition(".")
        plain.setdefault(section, {})[name] = value
    return build_config(plain)


def remedy(plan: RunPlan, nodes: int, per_node: int) -> tuple[Change, RunPlan] | None:
    """The first of the changes, from the cheapest on, with which the run fits, planned again; None: none does."""
    for change in _changes(plan, per_node):
        try:
            again = plan_run(changed(plan.config, change.values), plan.vocab_size, plan.device, nodes, per_node)
        except ConfigError:
            continue
        if again.fits:
            return change, again
    return None


def _changes(plan: RunPlan, per_node: int) -> Iterator[Change]:
    config = plan.config
    training, parallel = config.training, config.parallel
    copies = config.data_parallel_size(plan.world_size) * parallel.context_parallel_size
    if parallel.zero_stage == 0 and copies > 1:
        yield Change("shard the optimizer state (ZeRO-1)", {"parallel.use_distributed_optimizer": True})
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield Change("sequence parallelism", {"parallel.sequence_parallel": True})
    if training.recompute_granularity is None and keeps_scores(config.model):
        yield Change("recompute attention", {"training.recompute_granularity": "selective"})
    for size in reversed(divisors_of(training.micro_batch_size)[:-1]):
        yield Change(f"micro batch {size}", {"training.micro_batch_size": size})
    full = {"training.recompute_granularity": "full", "training.recompute_method": "uniform"}
    if training.recompute_granularity != "full":
        yield Change("full recompute", {**full, "training.recompute_modules": []})
    for tp in (2, 4, 8, 16):
        if parallel.tensor_model_parallel_size < tp <= per_node:
            yield Change(f"tensor parallelism {tp}", {"parallel.tensor_model_parallel_size": tp})
    if copies > 1 and parallel.zero_stage < 3:
        sharding = "optim_grads_params"
        keys = {"parallel.data_parallel_sharding_strategy": sharding, "parallel.use_distributed_optimizer": False}
        yield Change("shard weights and gradients (ZeRO-3)", keys)
    if not config.optimizer.optimizer_cpu_offload:
        yield Change("optimizer state in CPU memory", {"optimizer.optimizer_cpu_offload": True})
