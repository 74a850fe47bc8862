"""The global batch of each number of nodes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from llmctl.errors import UsageError
from trainer.planning.layouts import multiples_around

BATCH = "training.global_batch_size"
_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def parse_sizes(text: str) -> tuple[int, ...]:
    """Numbers of nodes in ``1,2,4``, ascending.

    Raises:
        UsageError: an entry is not a number above 0.
    """
    words = [word.strip() for word in text.split(",")]
    wrong = next((word for word in words if not (word.isascii() and word.isdecimal() and int(word))), None)
    if wrong is not None:
        raise UsageError(f"--nodes {text}: {wrong!r} is not a number of nodes; give numbers from 1, such as 1,2,4,8")
    return tuple(sorted(set(map(int, words))))


@dataclass(frozen=True)
class Batches:
    """The global batches, and what is to be told about them.

    Attributes:
        of: number of nodes -> samples. With a problem, those of a batch that all sizes can divide.
        problem: sentence; empty without one.
        note: sentence on a batch that the config does not name; else empty.
    """

    of: Mapping[int, int]
    problem: str = ""
    note: str = ""


def batches_of(
    values: Mapping[str, Any], ranks: Mapping[int, int], *, is_weak: bool, known: tuple[int, int] | None = None
) -> Batches:
    """The global batch of each size.

    Strong: that of the config at all sizes. Weak: that of the config at the smallest size, and as many samples per node
    at the others. A config without a batch takes the smallest one that goes with all sizes.

    Args:
        values: of the config, as given.
        ranks: number of nodes -> ranks.
        is_weak: grow the batch with the nodes.
        known: nodes and batch of a size that has run before.
    """
    first = min(ranks)
    rounds = {nodes: _samples_of_a_round(values, count) for nodes, count in ranks.items()}
    # Every size divides its own batch if that of the smallest size is a multiple of each of these numbers.
    units = {nodes: first * part // gcd(nodes, first * part) if is_weak else part for nodes, part in rounds.items()}
    unit = lcm(*units.values())
    given: int | None = known[1] if known is not None else _given_batch(values)
    if known is not None and is_weak:
        given, rest = divmod(known[1] * first, known[0])
        if rest:
            raise UsageError(
                f"--nodes {first}: the batch of {known[1]} samples on {_counted(known[0])}, which has run, cannot "
                "shrink so far; leave this size out, or give another --name"
            )
    if given is None:
        note = "" if is_weak else f"{BATCH}: is unset; all sizes have {unit}, the smallest that goes with all of them"
        return Batches(_spread(unit, ranks, is_weak=is_weak), note=note)
    wrong = [nodes for nodes, needed in units.items() if given % needed]
    if not wrong:
        return Batches(_spread(given, ranks, is_weak=is_weak))
    valid = -(-given // unit) * unit
    at = f", which grows from {_counted(first)} on," if is_weak else ""
    many = _counted(wrong[0]) if len(wrong) == 1 else f"{', '.join(map(str, wrong))} nodes"
    problem = (
        f"{BATCH}: {given}{at} cannot be divided among the replicas of {many}; use {multiples_around(given, unit)}, "
        f"the nearest for --nodes {','.join(map(str, ranks))}: --set {BATCH}={valid}"
    )
    return Batches(_spread(valid, ranks, is_weak=is_weak), problem)


def _counted(nodes: int) -> str:
    return f"{nodes} node{'s' * (nodes > 1)}"


def _spread(batch: int, ranks: Mapping[int, int], *, is_weak: bool) -> dict[int, int]:
    first = min(ranks)
    return {nodes: batch * nodes // first if is_weak else batch for nodes in ranks}


def _given_batch(values: Mapping[str, Any]) -> int | None:
    """The full batch that the config names; None without one, and for a value that the check of the config refuses."""
    from trainer.config.sections.batch_sizes import steps_of

    training = section(values, "training")
    steps, length = training.get("step_batch_size_schedule"), training.get("seq_length")
    if isinstance(steps, str) and type(length) is int and length > 0:
        try:
            return steps_of(steps, length)[-1][1]
        except ValueError as error:
            raise UsageError(f"training.step_batch_size_schedule: {error}") from None
    given = training.get("global_batch_size")
    return given if type(given) is int and given > 0 else None


def _samples_of_a_round(values: Mapping[str, Any], ranks: int) -> int:
    """Samples of one micro-batch of all replicas; the layout of other numbers of ranks is refused elsewhere."""
    parallel, training = section(values, "parallel"), section(values, "training")
    replicas = ranks
    for size in _whole(parallel, _LAYOUT):
        replicas //= size
    (micro,) = _whole(training, ("micro_batch_size",))
    return max(1, replicas) * micro


def _whole(values: Mapping[str, Any], keys: Sequence[str]) -> list[int]:
    found = [values.get(key) for key in keys]
    return [value if type(value) is int and value > 0 else 1 for value in found]


def section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a config as given; empty if it is absent or not a mapping."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}
