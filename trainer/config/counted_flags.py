"""Flags that count the length of a training in samples or tokens. Torch-free.

Keys count iterations. With a constant global batch a number of samples or tokens is a number of iterations, which for
a learning-rate schedule may be a fraction. With a batch that grows or has steps, the keys of a schedule count batches
of the last size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.sections.batch_sizes import BatchSizes, can_grow, steps_of

_KEYS = {
    "train": "training.train_iters",
    "lr-decay": "optimizer.lr_decay_iters",
    "lr-warmup": "optimizer.lr_warmup_iters",
    "lr-wsd-decay": "optimizer.lr_wsd_decay_iters",
}
COUNTED = {f"{name}-{unit}": key for name, key in _KEYS.items() for unit in ("samples", "tokens")}
"""Flag -> dotted key that counts the same in iterations. Those in tokens are Megatron-DeepSpeed's."""
OF_SAMPLES = "optimizer.lr_decay_iters"
"""The key that ``--train-samples`` sets too, beside a batch that grows, unless a flag of its own does."""
_RAMP = "training.rampup_batch_size"
_STEPS = "training.step_batch_size_schedule"


def iterations_of(counted: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys in iterations for the given flags.

    Args:
        counted: flags of ``COUNTED`` and their arguments.
        values: the other keys of the command line.

    Raises:
        ValueError: one sentence that begins with the flag.
    """
    result: dict[str, Any] = {}
    steps = _steps(values)
    ramp = () if steps else _ramp(values)
    for flag, text in counted.items():
        count, key = _count(flag, text), COUNTED[flag]
        # Megatron-DeepSpeed ends at the iterations or at the tokens, whichever comes first.
        ends_at_first = flag == "train-tokens" and str(values.get(key)).isdecimal()
        if key in values and not ends_at_first:
            other = key.rpartition(".")[2].replace("_", "-")
            raise ValueError(f"--{flag}: cannot be combined with --{other}; give only one of the two")
        full = steps[-1][1] if steps else _size(flag, "global-batch-size", values, "training.global_batch_size")
        length = _size(flag, "seq-length", values, "training.seq_length") if flag.endswith("-tokens") else 1
        if key != _KEYS["train"]:
            result[key] = _full_batches(count, full * length)
            continue
        # Training ends as soon as either is reached: samples in whole batches, tokens with the batch that reaches them.
        sizes = BatchSizes(full, ramp, steps)
        iterations = sizes.iterations_of(count) if length == 1 else sizes.iterations_reaching(-(-count // length))
        others = [result[key]] if key in result else [int(values[key])] if key in values else []
        result[key] = min([iterations, *others])
    if (ramp or steps) and "train-samples" in counted and not _has_decay(values, result):
        # As in Megatron-LM, of the samples that are asked for: training ends within a batch of them.
        samples = _count("train-samples", counted["train-samples"])
        full = steps[-1][1] if steps else int(values["training.global_batch_size"])
        result[OF_SAMPLES] = _full_batches(samples, full)
    return result


def _ramp(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of a batch that grows; empty without, and for numbers that the config's check refuses.

    Raises:
        ValueError: the run is counted in iterations, which Megatron-LM refuses with such a batch.
    """
    if _RAMP not in values:
        return ()
    if _KEYS["train"] in values:
        raise ValueError(
            "--rampup-batch-size: cannot be combined with --train-iters, as in Megatron-LM, because iterations then "
            "differ in samples; give --train-samples"
        )
    try:
        numbers, full = tuple(map(int, values[_RAMP])), int(values["training.global_batch_size"])
    except (KeyError, ValueError):
        return ()
    return numbers if can_grow(numbers, full) else ()


def _steps(values: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Batch sizes in steps; empty without.

    Raises:
        ValueError: the steps are not valid, or the run is counted in iterations, of which Megatron-LM's schedules then
            count others than these.
    """
    if _STEPS not in values:
        return ()
    flag = _STEPS.rpartition(".")[2].replace("_", "-")
    if _KEYS["train"] in values:
        raise ValueError(
            f"--{flag}: cannot be combined with --train-iters, because iterations then differ in samples; give "
            "--train-samples"
        )
    try:
        return steps_of(str(values[_STEPS]), _size(flag, "seq-length", values, "training.seq_length"))
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("--") else f"--{flag}: {error}") from None


def _has_decay(*given: Mapping[str, Any]) -> bool:
    return any(_KEYS["lr-decay"] in values for values in given)


def _full_batches(count: int, size: int) -> float:
    return count // size if count % size == 0 else count / size


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
