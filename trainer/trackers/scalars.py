"""Scalars of a row of metrics.jsonl, by Megatron-LM's names, so that old dashboards work. Pure and torch-free.

Megatron-LM: ``training_log`` and ``evaluate_and_print_results`` of megatron/training/training.py, ``track_mtp_metrics``
of megatron/core/transformer/multi_token_prediction.py, ``track_moe_metrics`` of megatron/core/transformer/moe/
moe_utils.py and ``Timers.write`` of megatron/core/timers.py, at commit 001b00c2. A number that has no name there keeps
its key; one inside a mapping is ``mapping/key``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.trackers.protocol import SAMPLES

NAMES = {
    "lm_loss": "lm loss",
    "sop_loss": "sop loss",
    "learning_rate": "learning-rate",
    "batch_size": "batch-size",
    "loss_scale": "loss-scale",
    "grad_norm": "grad-norm",
    "params_norm": "params-norm",
    "num_zeros_in_grad": "num-zeros",
    "iteration_time_s": "iteration-time",
    "tflops_per_device": "throughput",
    "peak_memory_bytes": "mem-max-allocated-bytes",
    "memory_allocated_bytes": "mem-allocated-bytes",
    "memory_reserved_bytes": "mem-reserved-bytes",
    "world_size": "world-size",
    "timers_s/data/max": "batch-generator-time",
    "timers_s/forward_backward/max": "forward-backward-time",
    "timers_s/gradient_sync/max": "all-grads-sync-time",
    "timers_s/optimizer/max": "optimizer-time",
    "timers_s/forward_compute/max": "forward-compute-time",
    "timers_s/backward_compute/max": "backward-compute-time",
    "valid_loss": "lm loss validation",
    "valid_ppl": "lm loss validation ppl",
    "valid_sop_loss": "sop loss validation",
    "consumed_samples": SAMPLES,
}
"""Key of a row -> name of Megatron-LM. Times are in seconds, ``throughput`` in TFLOP/s of one device."""

BY_SAMPLES = frozenset(
    {
        *("lm loss", "sop loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "params-norm", "num-zeros"),
        *("world-size", "lm loss validation", "lm loss validation ppl", "sop loss validation"),
    }
)
"""Names that Megatron-LM also draws over samples in TensorBoard, as ``NAME vs samples``."""

_PATTERNS = (
    (re.compile(r"mtp_(\d+)_loss"), r"mtp_\1 loss"),
    (re.compile(r"moe_layers/(?:.*\.)?(\d+)/(\w+_loss)"), r"moe/\2_layer_\1"),
)
_NOT_DRAWN = frozenset({"attempt", "fencing_token", "iteration", "time"})


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of a row, by name. Texts, switches and what is not finite are left out."""
    return dict(_scalars(row, ""))


def _scalars(values: Mapping[str, Any], group: str) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{group}{key}/")
        elif _is_finite(value) and (group or key not in _NOT_DRAWN):
            yield _name(f"{group}{key}"), float(value)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _name(key: str) -> str:
    if key in NAMES:
        return NAMES[key]
    for pattern, name in _PATTERNS:
        if pattern.fullmatch(key):
            return pattern.sub(name, key)
    return key
