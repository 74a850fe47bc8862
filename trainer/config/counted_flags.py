"""Flags that count the length of a training in samples or tokens. Torch-free.

Keys count iterations. With a constant global batch a number of samples or tokens is a number of iterations, which for
a learning-rate schedule may be a fraction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_KEYS = {
    "train": "training.train_iters",
    "lr-decay": "optimizer.lr_decay_iters",
    "lr-warmup": "optimizer.lr_warmup_iters",
    "lr-wsd-decay": "optimizer.lr_wsd_decay_iters",
}
COUNTED = {f"{name}-{unit}": key for name, key in _KEYS.items() for unit in ("samples", "tokens")}
"""Flag -> dotted key that counts the same in iterations. Those in tokens are Megatron-DeepSpeed's."""


def iterations_of(counted: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys in iterations for the given flags.

    Args:
        counted: flags of ``COUNTED`` and their arguments.
        values: the other keys of the command line.

    Raises:
        ValueError: one sentence that begins with the flag.
    """
    result: dict[str, Any] = {}
    for flag, text in counted.items():
        count, key = _count(flag, text), COUNTED[flag]
        if key in values:
            other = key.rpartition(".")[2].replace("_", "-")
            raise ValueError(f"--{flag}: cannot be combined with --{other}; give only one of the two")
        step = _size(flag, "global-batch-size", values, "training.global_batch_size")
        if flag.endswith("-tokens"):
            step *= _size(flag, "seq-length", values, "training.seq_length")
        if key != _KEYS["train"]:
            result[key] = count // step if count % step == 0 else count / step
            continue
        # Training ends as soon as either is reached: samples in whole batches, tokens with the batch that reaches them.
        iterations = count // step if flag.endswith("-samples") else math.ceil(count / step)
        result[key] = min(iterations, result.get(key, iterations))
    return result


def _count(flag: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(f"--{flag}: {text!r} is not a whole number of 0 or more")
    return number


def _size(flag: str, other: str, values: Mapping[str, Any], key: str) -> int:
    try:
        size = int(values[key])
    except (KeyError, ValueError):
        size = 0
    if size < 1:
        raise ValueError(f"--{flag}: is converted to iterations, which needs --{other} on the command line; give it")
    return size
