"""Checks of parallel layout, pipeline schedule and recompute. Torch-free.

trainer.planning.incompatible has a row for each combination that is invalid for all numbers; this module has functions
for relations between numbers. To allow a new combination, remove its check from these two modules.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.config.sections.batch_sizes import MAX_INCREMENTS, MAX_MICRO_BATCHES, steps_of
from trainer.config.sections.section import MAX_INT
from trainer.planning.layouts import divisors, divisors_of, in_words, multiples_around
from trainer.planning.pipeline import pipeline_placement, virtual_stages_per_rank
from trainer.planning.sequence_division import sequence_divisor

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

TYPICAL_VOCAB_SIZE = 32_000
"""Used before the vocabulary is known. It affects the balance of the stages, never their validity."""

RECOMPUTE_MODULES = ("core_attn", "mlp", "mlp_act", "layernorm", "moe", "moe_act")

# Keys that place layers or set the number of virtual stages. The first key of each row excludes the others.
EXCLUSIVE_KEYS = (
    (
        "pipeline_model_parallel_layout",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
    ),
    (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    ),
)

_STEPS = "training.step_batch_size_schedule"


def check_parallelism(config: TrainConfig) -> None:
    """Refuse a layout, schedule or recompute setting that is invalid for any job.

    Raises:
        ConfigError: names the key, its value and the nearest valid values.
    """
    _check_tensor_parallel(config)
    _check_context_parallel(config)
    _check_recompute(config)
    _check_pipeline(config)


def check_exclusive(config: TrainConfig) -> None:
    """Refuse two keys that set the same thing.

    Raises:
        ConfigError: names both keys.
    """
    for key, *others in EXCLUSIVE_KEYS:
        if getattr(config.parallel, key) is None:
            continue
        for other in others:
            if getattr(config.parallel, other) is not None:
                raise ConfigError(
                    f"parallel.{key}", f"cannot be combined with parallel.{other}; set only one of the two"
                )


def tensor_parallel_widths(config: TrainConfig, tp: int) -> Iterator[tuple[str, int, int]]:
    """(key, width, ranks of ``tp`` that must divide it) of every width that tp divides."""
    model = config.model
    yield "num_attention_heads", model.num_attention_heads, tp
    if model.has_dense_layers:
        yield "ffn_hidden_size", model.ffn_size, tp
    if model.num_experts is not None:
        name = "ffn_hidden_size" if model.moe_ffn_hidden_size is None else "moe_ffn_hidden_size"
        yield name, model.expert_ffn_size, tp // config.parallel.expert_shares_of(tp)
        if model.moe_shared_expert_intermediate_size is not None:
            yield "moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size, tp


def fits_tensor_parallel(config: TrainConfig, tp: int) -> bool:
    """True if ``tp`` divides every width and fits the number of key/value heads.

    It must divide that number or be a multiple of it.
    """
    groups = config.model.query_groups
    if groups % tp and tp % groups:
        return False
    return all(width % ranks == 0 for _, width, ranks in tensor_parallel_widths(config, tp))


def fits_context_parallel(config: TrainConfig, tp: int, cp: int) -> bool:
    """True if the sequence and, with a2a, the heads divide over ``cp`` ranks.

    With sequence parallelism the sequence must divide over cp x tp.
    """
    heads = config.model.num_attention_heads // tp
    has_heads = config.parallel.cp_comm_type == "p2p" or heads % cp == 0
    return has_heads and config.training.seq_length % _sequence_divisor(config, tp, cp) == 0


def _sequence_divisor(config: TrainConfig, tp: int, cp: int) -> int:
    chunks = sequence_divisor(cp, config.parallel.cp_comm_type)
    return math.lcm(chunks, cp * tp) if config.parallel.sequence_parallel else chunks


def _check_tensor_parallel(config: TrainConfig) -> None:
    tp, model = config.parallel.tensor_model_parallel_size, config.model
    key = "parallel.tensor_model_parallel_size"
    if tp == 1:
        return
    for name, size, ranks in tensor_parallel_widths(config, tp):
        if size % ranks:
            key = key if ranks == tp else "parallel.expert_tensor_parallel_size"
            raise ConfigError(key, f"{ranks} does not divide model.{name} {size}; use one of {divisors(size)}")
    groups = model.query_groups
    if groups % tp and tp % groups:
        valid = [n for n in divisors_of(model.num_attention_heads) if fits_tensor_parallel(config, n)]
        raise ConfigError(
            key,
            f"{tp} is neither a divisor nor a multiple of model.num_query_groups {groups}; use one of "
            + in_words(valid),
        )


def _check_context_parallel(config: TrainConfig) -> None:
    parallel, length = config.parallel, config.training.seq_length
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    divisor = _sequence_divisor(config, tp, cp)
    if length % divisor:
        if cp == 1:
            reason, remedy = "as sequence_parallel requires", "switch parallel.sequence_parallel off"
            what = f"tensor_model_parallel_size {tp}"
        else:
            with_tp = f" and sequence_parallel over {tp} ranks" if parallel.sequence_parallel and tp > 1 else ""
            reason = f"as context_parallel_size {cp} with cp_comm_type {parallel.cp_comm_type}{with_tp} requires"
            what, remedy = str(divisor), "choose another parallel.context_parallel_size"
        raise ConfigError(
            "training.seq_length",
            f"{length} is not divisible by {what}, {reason}; use {multiples_around(length, divisor)} or {remedy}",
        )
    heads = config.model.num_attention_heads // tp
    if parallel.cp_comm_type == "a2a" and heads % cp:
        raise ConfigError(
            "parallel.context_parallel_size",
            f"{cp} does not divide the {heads} attention heads of each tensor-parallel rank, as cp_comm_type a2a "
            f"requires; use one of {divisors(heads)}, or cp_comm_type p2p",
        )


def _check_recompute(config: TrainConfig) -> None:
    for module in config.training.recompute_modules:
        if module not in RECOMPUTE_MODULES:
            near = difflib.get_close_matches(module, RECOMPUTE_MODULES, n=1, cutoff=0.5)
            meant = f"; did you mean {near[0]}?" if near else f"; use one of {', '.join(RECOMPUTE_MODULES)}"
            raise ConfigError("training.recompute_modules", f"{module!r} cannot be recomputed{meant}")


def _check_pipeline(config: TrainConfig) -> None:
    """Refuse an impossible division of layers.

    Imports the partition lazily, because most configs need none.
    """
    parallel = config.parallel
    pp, layers = parallel.pipeline_model_parallel_size, config.model.num_layers
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if pp == 1 and getattr(parallel, name) is not None:
            raise ConfigError(
                f"parallel.{name}", "needs parallel.pipeline_model_parallel_size above 1; raise that, or leave this out"
            )
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if per_stage is not None and (layers % (pp * per_stage)):
        fits = divisors(layers // pp) if layers % pp == 0 else None
        remedy = f"use one of {fits}" if fits else f"use {multiples_around(layers, pp)} layers"
        raise ConfigError(
            "parallel.num_layers_per_virtual_pipeline_stage",
            f"{per_stage} x pipeline_model_parallel_size {pp} does not divide model.num_layers {layers}; {remedy}, or "
            "num_virtual_stages_per_pipeline_rank, which allows stages of unequal size",
        )
    layout = parallel.pipeline_model_parallel_layout
    if layout is not None:
        _check_layout(config, layout)
    if layout is not None or pipeline_placement(config).num_virtual_stages > 1:
        from trainer.planning.stage_partition import check_enough_parts, partition_layers

        # Uneven stages are cut by cost, so that only the partition itself tells if they fit.
        check_enough_parts(config)
        counts = (layout, parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers)
        if any(count is not None for count in counts):
            partition_layers(config, TYPICAL_VOCAB_SIZE)


def _check_layout(config: TrainConfig, layout: str) -> None:
    from trainer.planning.stage_layout import count_prediction_layers, parse_stage_layout

    pp, stages = config.parallel.pipeline_model_parallel_size, len(parse_stage_layout(layout))
    exact = config.parallel.pipeline_schedule == "zb-v"
    wanted = pp * virtual_stages_per_rank(config) if exact else pp
    if stages != wanted if exact else stages % wanted:
        raise ConfigError(
            "parallel.pipeline_model_parallel_layout",
            f"{layout!r} has {stages} virtual stages, but pipeline_model_parallel_size {pp} requires "
            + (
                f"{wanted} with pipeline_schedule zb-v"
                if exact
                else f"a multiple of {pp}; use {multiples_around(stages, pp)}"
            ),
        )

    predicted, wanted = count_prediction_layers(layout), config.model.mtp_num_layers
    if predicted != wanted:
        raise ConfigError(
            "parallel.pipeline_model_parallel_layout",
            f"{layout!r} has {predicted} layers of multi-token prediction (m), but model.mtp_num_layers is {wanted}; "
            "change one of the two",
        )


def check_batch_steps(config: TrainConfig) -> None:
    """Refuse steps that are not valid, or stand beside another batch size.

    Raises:
        ConfigError: names the step, or the other key.
    """
    training = config.training
    if training.step_batch_size_schedule is None:
        return
    try:
        steps_of(training.step_batch_size_schedule, training.seq_length)
    except ValueError as error:
        raise ConfigError(_STEPS, str(error)) from None
    beside = {"rampup_batch_size": training.rampup_batch_size, "global_batch_size": training.global_batch_size}
    for key in [key for key, value in beside.items() if value]:
        raise ConfigError(
            _STEPS, f"cannot be combined with training.{key}, because the steps name all sizes; set only one"
        )


def check_batches_fit(config: TrainConfig, dp: int) -> None:
    """Refuse batches of which some size does not divide over ``dp`` replicas, or makes too many micro-batches.

    Raises:
        ConfigError: names the size, and the nearest that fit.
    """
    sizes, micro_batch_size = config.batch_sizes(dp), config.training.micro_batch_size
    key = _STEPS if sizes.steps else "training.global_batch_size"
    for size in dict.fromkeys(phase.samples for phase in sizes.phases) if sizes.steps else (sizes.full,):
        _check_batch_fits(key, size, micro_batch_size, dp)
    if sizes.ramp:
        _check_ramp_fits(config, dp)


def _check_batch_fits(key: str, samples: int, micro_batch_size: int, dp: int) -> None:
    step = micro_batch_size * dp
    if samples % step:
        raise ConfigError(
            key,
            f"{samples} is not divisible by micro_batch_size {micro_batch_size} x DP {dp} = {step}; use "
            f"{multiples_around(samples, step)}",
        )
    if samples // step > MAX_MICRO_BATCHES:
        raise ConfigError(
            key,
            f"{samples} makes {samples // step:,} micro-batches per replica and iteration; use at most "
            f"{MAX_MICRO_BATCHES * step:,}, which makes {MAX_MICRO_BATCHES:,}",
        )


def check_batch_ramp(config: TrainConfig) -> None:
    """Refuse a growing batch that cannot grow as asked.

    Raises:
        ConfigError: names the number, and one that fits.
    """
    ramp, full, key = config.training.rampup_batch_size, config.training.global_batch_size, "training.rampup_batch_size"
    if not ramp:
        return
    if len(ramp) != 3 or min(ramp) < 1 or max(ramp) > MAX_INT:
        raise ConfigError(
            key,
            f"{ramp} is not valid; give three numbers from 1 to {MAX_INT:,}: the first batch size, the increment and "
            "the samples of the ramp, such as [16, 8, 300000]",
        )
    start, increment, _ = ramp
    if full is None:
        raise ConfigError(key, "needs training.global_batch_size, the size at the end of the ramp; set it")
    if start >= full:
        raise ConfigError(
            key, f"the first batch size {start} is not below global_batch_size {full}; lower it, or leave the key out"
        )
    if (full - start) % increment:
        raise ConfigError(
            key,
            f"the increment {increment} does not divide the difference {full - start} of the first batch size {start} "
            f"and global_batch_size {full}; use {_nearest_divisor(full - start, increment)}",
        )
    if (full - start) // increment > MAX_INCREMENTS:
        raise ConfigError(
            key,
            f"has {(full - start) // increment:,} increments; use at most {MAX_INCREMENTS:,}, by a larger increment",
        )


def _check_ramp_fits(config: TrainConfig, dp: int) -> None:
    """Refuse a growing batch of which some size does not divide over ``dp`` replicas.

    The full batch must divide.

    Raises:
        ConfigError: names the size, and the nearest ramp that fits.
    """
    sizes, micro_batch_size = config.batch_sizes(dp), config.training.micro_batch_size
    step = micro_batch_size * dp
    wrong = next((phase.samples for phase in sizes.phases if phase.samples % step), None)
    if wrong is None:
        return
    start, increment, samples = sizes.ramp
    remedy = "leave the key out, or use fewer replicas"
    if sizes.full > step:
        first = min(max(step, round(start / step) * step), sizes.full - step)
        fitting = _nearest_divisor((sizes.full - first) // step, increment / step) * step
        remedy = f"use {[first, fitting, samples]}, or fewer replicas"
    raise ConfigError(
        "training.rampup_batch_size",
        f"the batch of {wrong} samples on the way to {sizes.full} is not divisible by micro_batch_size "
        f"{micro_batch_size} x DP {dp} = {step}; {remedy}",
    )


def _nearest_divisor(number: int, wanted: float) -> int:
    return min(divisors_of(number), key=lambda divisor: (abs(divisor - wanted), divisor))


def check_profile(config: TrainConfig) -> None:
    """Refuse steps that the run does not have, and a profile of no rank.

    Raises:
        ConfigError: names the key.
    """
    steps, train_iters = config.logging.profile_steps, config.training.train_iters
    if not config.logging.profile_ranks:
        raise ConfigError("logging.profile_ranks", "has no rank; give at least one, such as [0]")
    if steps is not None and steps[1] > train_iters:
        raise ConfigError(
            "logging.profile_steps",
            f"{steps} is beyond the last iteration, training.train_iters {train_iters}; use earlier ones",
        )


def check_profile_ranks(config: TrainConfig, world_size: int) -> None:
    """Refuse ranks that a job of ``world_size`` ranks does not have.

    Raises:
        ConfigError: names the ranks.
    """
    missing = [rank for rank in config.logging.profile_ranks if rank >= world_size]
    if missing:
        raise ConfigError(
            "logging.profile_ranks",
            f"{missing} is not in the job, which has {world_size} ranks; use ranks from 0 to {world_size - 1}",
        )
