"""DeepSpeed's JSON config as values of the training config. Keys: https://www.deepspeed.ai/docs/config-json/."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llmctl.scripts.errors import ScriptError

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_FP16 = {
    "loss_scale_window": "training.loss_scale_window",
    "hysteresis": "training.hysteresis",
    "min_loss_scale": "training.min_loss_scale",
}
_AUTO = (None, "auto")
_NONE = ("none", None)


def read_deepspeed(text: str, line: int, name: str) -> Iterator[tuple[str, str, Any]]:
    """Path in the JSON, dotted key, and value, for each entry with a meaning for the training config.

    The value is None where the entry asks for what the config does without the key.

    Raises:
        ScriptError: the text is not a JSON object, or asks for what this trainer does not do.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ScriptError(line, f"{name}: is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ScriptError(line, f"{name}: is not a JSON object")
    yield from _zero(_mapping(values, "zero_optimization"), line, name)
    for section in ("fp16", "bf16", "bfloat16"):
        if _mapping(values, section).get("enabled") is True:
            yield f"{section}.enabled", f"training.{'fp16' if section == 'fp16' else 'bf16'}", True
    yield from _fp16(_mapping(values, "fp16"))
    for source, key in (
        ("train_micro_batch_size_per_gpu", "training.micro_batch_size"),
        ("train_batch_size", "training.global_batch_size"),
        ("gradient_clipping", "optimizer.clip_grad"),
        ("steps_per_print", "logging.log_interval"),
    ):
        if values.get(source) not in _AUTO:
            yield source, key, values[source]


def _zero(zero: Mapping[str, Any], line: int, name: str) -> Iterator[tuple[str, str, Any]]:
    stage = zero.get("stage")
    if isinstance(stage, int) and 0 <= stage < len(_STRATEGIES):
        yield "zero_optimization.stage", "parallel.data_parallel_sharding_strategy", _STRATEGIES[stage]
    if _mapping(zero, "offload_param").get("device") not in _NONE:
        raise ScriptError(
            line, f"{name}: zero_optimization.offload_param is not supported; offload the optimizer alone"
        )
    device = _mapping(zero, "offload_optimizer").get("device")
    if device == "nvme":
        raise ScriptError(line, f"{name}: zero_optimization.offload_optimizer to nvme is not supported; use cpu")
    if device == "cpu" or zero.get("cpu_offload") is True:
        yield "zero_optimization.offload_optimizer", "optimizer.optimizer_cpu_offload", True


def _fp16(section: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    if section.get("enabled") is not True:
        return
    if section.get("loss_scale") not in (*_AUTO, 0):
        yield "fp16.loss_scale", "training.loss_scale", section["loss_scale"]
    elif section.get("loss_scale") != "auto":
        yield "fp16.loss_scale", "training.loss_scale", None
    if isinstance(section.get("initial_scale_power"), int):
        yield "fp16.initial_scale_power", "training.initial_loss_scale", 2.0 ** section["initial_scale_power"]
    for name, key in _FP16.items():
        if section.get(name) not in _AUTO:
            yield f"fp16.{name}", key, section[name]


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}
