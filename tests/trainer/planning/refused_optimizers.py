"""Settings of the optimizer that are refused: see refused_combinations.py."""

from __future__ import annotations

from typing import Any

_BF16 = {"bf16": True}
_REMAINDERS, _SHARDING = "store_param_remainders", "data_parallel_sharding_strategy"

REFUSED_OPTIMIZERS: list[tuple[dict[str, dict[str, Any]], str, str, dict[str, dict[str, Any]]]] = [
    *(
        (
            {"optimizer": {key: value, "optimizer": "sgd"}, "training": {"bf16": True}},
            f"optimizer.{key}",
            "is about the state of Adam, but optimizer.optimizer is sgd; use adam, or leave this key out",
            {"optimizer": {key: value, "optimizer": "adam"}},
        )
        for key, value in (("exp_avg_dtype", "bf16"), ("exp_avg_sq_dtype", "bf16"), (_REMAINDERS, True))
    ),
    *(
        (
            {"optimizer": {_REMAINDERS: True}, "training": training},
            f"optimizer.{_REMAINDERS}",
            "needs bf16 weights, which are the upper half of their masters; use training.bf16, or leave this key out",
            {"training": {"bf16": True, "fp16": False}},
        )
        for training in ({"bf16": False}, {"fp16": True})
    ),
    *(
        (
            {"optimizer": {_REMAINDERS: True}, "training": _BF16, "parallel": {_SHARDING: stage}},
            f"optimizer.{_REMAINDERS}",
            "needs bf16 weights, but optim_grads and optim_grads_params shard float32 ones; use optim, or leave this",
            {"parallel": {_SHARDING: "optim"}},
        )
        for stage in ("optim_grads", "optim_grads_params")
    ),
    (
        {"optimizer": {_REMAINDERS: True, "optimizer_cpu_offload": True}, "training": _BF16},
        f"optimizer.{_REMAINDERS}",
        "cannot be combined with optimizer_cpu_offload, which keeps masters in CPU memory; leave out one of the",
        {"optimizer": {"optimizer_cpu_offload": False}},
    ),
] + [
    (
        {"training": {"bf16": True}, "optimizer": {"main_grads_dtype": "bf16"}, **change},
        "optimizer.main_grads_dtype",
        message,
        cure,
    )
    for change, message, cure in (
        ({"training": {"bf16": False}}, "needs training.bf16", {"training": {"bf16": True}}),
        (
            {"optimizer": {"main_grads_dtype": "bf16", "optimizer": "sgd"}},
            "needs optimizer.optimizer adam",
            {"optimizer": {"optimizer": "adam"}},
        ),
        (
            {"optimizer": {"main_grads_dtype": "bf16", "optimizer_cpu_offload": True}},
            "is not supported with optimizer.optimizer_cpu_offload",
            {"optimizer": {"optimizer_cpu_offload": False}},
        ),
        (
            {"parallel": {"data_parallel_sharding_strategy": "optim_grads"}},
            "is not supported with ZeRO-2 and ZeRO-3",
            {"parallel": {"data_parallel_sharding_strategy": "optim"}},
        ),
    )
]
