"""Judgement of the preflight: facts of all ranks in, findings out. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_high
from typing import Any

from trainer.preflight.facts import RankFacts, nodes_of

SLOW = 0.7
"""Share of the median speed below which a device is too slow, as NVIDIA Resiliency Extension's straggler threshold."""
SLOWER = 0.85
"""Share of the median speed below which a device is told as slower, without an end of the run."""
OCCUPIED = 0.9
"""Share of the median free memory of a GPU below which another process holds a part of it."""
SHORT = 0.5
"""Share of the median free memory of the nodes below which a node is told."""
CLOCK_S = 30.0
"""Seconds between a node's clock and the median above which a node is told."""
CHECKPOINTS = "checkpoint folder"
"""Name of the folder that needs room for a whole checkpoint."""
_LEAVE_OUT = "leave the node out with --exclude, and tell the administrators"


@dataclass(frozen=True)
class Finding:
    """One finding on a node.

    Attributes:
        rank: the rank that has measured it, the first one of several.
        host: name of its machine.
        what: the thing that was measured.
        measured: its value, with the unit.
        expected: the value expected, with the unit.
        remedy: the thing to do.
        is_fatal: True if the attempt must not go on.
        culprits: names of the nodes that are at fault; empty if the finding tells of a folder or a setting.
    """

    rank: int
    host: str
    what: str
    measured: str
    expected: str
    remedy: str
    is_fatal: bool = True
    culprits: tuple[str, ...] = ()

    def sentence(self) -> str:
        """The finding as one sentence."""
        return f"node {self.host} (rank {self.rank}): {self.what}: {self.measured}, expected {self.expected}; " + (
            self.remedy
        )

    def as_plain(self) -> dict[str, Any]:
        """The fields as plain values, with the sentence."""
        return {**asdict(self), "culprits": list(self.culprits), "sentence": self.sentence()}


@dataclass(frozen=True)
class Trial:
    """An all-reduce over the ranks of one or two nodes, or of all.

    Attributes:
        nodes: numbers of the nodes; empty for all.
        problems: rank -> words on its failure; empty words for a right sum. A rank without an answer is left out.
        ranks: all ranks that should have taken part.
    """

    nodes: tuple[int, ...]
    problems: Mapping[int, str]
    ranks: tuple[int, ...]

    @property
    def is_right(self) -> bool:
        """True if every rank has got the right sum."""
        return all(self.problems.get(rank) == "" for rank in self.ranks)

    def words(self) -> str:
        """The first failure in words."""
        words = next((each for _, each in sorted(self.problems.items()) if each), "")
        return words or "no answer"


def judge(facts: Sequence[RankFacts], save_bytes: float = 0) -> list[Finding]:
    """Findings on what each rank has measured alone, in the order of ``ordered``.

    Args:
        facts: of all ranks that have answered.
        save_bytes: bytes of a checkpoint at the least; 0 if unknown.
    """
    found = [
        *_failed(facts),
        *_counts(facts),
        *_names(facts),
        *_reported(facts),
        *_speeds(facts),
        *_device_memory(facts),
        *_host_memory(facts),
        *_folders(facts),
        *_room(facts, save_bytes),
        *_clocks(facts),
    ]
    return ordered(found)


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that end the attempt first; of these, those that name a node; then in order of rank."""
    return sorted(findings, key=lambda one: (not one.is_fatal, not one.culprits, one.rank))


def _failed(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    for each in facts:
        if each.problem:
            yield Finding(
                each.rank, each.host, "measurements", each.problem, "an answer", _LEAVE_OUT, culprits=(each.host,)
            )


def _counts(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    counted = [each for each in facts if each.devices is not None and each.devices_asked is not None]
    few = [each for each in counted if (each.devices or 0) < (each.devices_asked or 0)]
    for each in _first_of_nodes(few, facts):
        is_alone = len(_nodes(few, facts)) < len(_nodes(facts, facts))
        remedy = _LEAVE_OUT if is_alone else "ask for fewer with --gpus-per-node; no node has more"
        culprits = (each.host,) if is_alone else ()
        asked = f"{each.devices_asked}, as asked (job.gpus_per_node)"
        yield Finding(each.rank, each.host, "number of GPUs", str(each.devices), asked, remedy, culprits=culprits)


def _names(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    named = [each for each in facts if each.device]
    counts = {name: sum(one.device == name for one in named) for name in sorted({one.device for one in named})}
    if len(counts) < 2:
        return
    most = max(counts, key=lambda name: counts[name])
    others = [each for each in named if each.device != most]
    remedy = "the slowest device sets the speed; ask for one kind of node with --resource-type"
    for each in _first_of_nodes(others, facts):
        expected = f"{most}, as {counts[most]} of {len(named)} ranks"
        yield Finding(each.rank, each.host, "device", each.device, expected, remedy, is_fatal=False)


def _reported(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    for each in facts:
        if each.broken:
            words = (each.rank, each.host, "errors that the GPU reports", each.broken, "none", _LEAVE_OUT)
            yield Finding(*words, culprits=(each.host,))
        elif each.worn:
            remedy = "tell the administrators if the run fails on this node"
            yield Finding(
                each.rank, each.host, "errors that the GPU reports", each.worn, "none", remedy, is_fatal=False
            )


def _speeds(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    for each, median in _beside_median(facts, lambda one: one.speed, lambda one: one.device):
        share = (each.speed or 0.0) / median
        if share >= SLOWER:
            continue
        is_fatal = share < SLOW
        measured = f"{(each.speed or 0.0) / 1e12:.3g} TFLOP/s, {share:.2f} of the median"
        expected = f"{SLOW if is_fatal else SLOWER:g} of {median / 1e12:.3g} TFLOP/s"
        remedy = _LEAVE_OUT if is_fatal else "the slowest device sets the speed of all"
        words = (each.rank, each.host, "speed of a matrix product", measured, expected, remedy)
        yield Finding(*words, is_fatal=is_fatal, culprits=(each.host,) if is_fatal else ())


def _device_memory(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    free = [each for each in facts if each.is_gpu]
    for each, median in _beside_median(free, lambda one: one.memory_free, lambda one: one.device):
        if (each.memory_free or 0.0) < OCCUPIED * median:
            words = ("free memory of the GPU", _gib(each.memory_free or 0.0), f"about {_gib(median)}")
            remedy = f"another process holds the rest: nvidia-smi shows it; end it, or {_LEAVE_OUT}"
            yield Finding(each.rank, each.host, *words, remedy, culprits=(each.host,))


def _host_memory(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    nodes = list(_first_of_nodes([each for each in facts if each.host_memory_free is not None], facts))
    for each, median in _beside_median(nodes, lambda one: one.host_memory_free, lambda _: ""):
        if (each.host_memory_free or 0.0) < SHORT * median:
            words = ("free memory of the node", _gib(each.host_memory_free or 0.0), f"about {_gib(median)}")
            remedy = "look for other work on the node if ranks run out of memory there"
            yield Finding(each.rank, each.host, *words, remedy, is_fatal=False)


def _folders(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    for name in sorted({folder.name for each in facts for folder in each.folders}):
        tried = [(each, folder) for each in facts for folder in each.folders if folder.name == name]
        failed = [(each, folder) for each, folder in tried if folder.problem]
        if not failed:
            continue
        each, folder = next(((each, folder) for each, folder in failed if folder.is_full), failed[0])
        if folder.is_full:
            remedy = "make room there, or choose another folder"
            yield Finding(each.rank, each.host, f"{name} {folder.path}", folder.problem, "room for a file", remedy)
            continue
        nodes = _nodes([one for one, _ in failed], facts)
        is_alone = len(nodes) < len(_nodes([one for one, _ in tried], facts))
        for one in _first_of_nodes([one for one, _ in failed], facts):
            where = next(found for each, found in failed if each is one)
            if is_alone:
                words = ("a folder that other nodes can write", _LEAVE_OUT)
                yield Finding(one.rank, one.host, f"{name} {where.path}", where.problem, *words, culprits=(one.host,))
            else:
                words = ("a folder that can be written", "correct its owner or mode, or choose another folder")
                yield Finding(one.rank, one.host, f"{name} {where.path}", where.problem, *words)
                break


def _room(facts: Sequence[RankFacts], save_bytes: float) -> Iterator[Finding]:
    """The node that sees the least room for a checkpoint, if that is too little. A run survives a missed save."""
    seen = [
        (folder.free, each.rank, each, folder)
        for each in facts
        for folder in each.folders
        if folder.name == CHECKPOINTS and folder.free is not None
    ]
    if seen and (least := min(seen, key=lambda one: one[:2]))[0] < save_bytes:
        free, rank, each, folder = least
        words = (f"room in the {CHECKPOINTS} {folder.path}", _gib(free), f"{_gib(save_bytes)} for one checkpoint")
        yield Finding(rank, each.host, *words, "make room before the first save", is_fatal=False)


def _clocks(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    nodes = list(_first_of_nodes([each for each in facts if each.clock is not None], facts))
    for each, median in _beside_median(nodes, lambda one: one.clock, lambda _: ""):
        ahead = (each.clock or 0.0) - median
        if abs(ahead) > CLOCK_S:
            measured = f"{abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
            remedy = "its times in logs are off; tell the administrators"
            words = ("clock", measured, f"within {CLOCK_S:.0f} s of the median", remedy)
            yield Finding(each.rank, each.host, *words, is_fatal=False)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _beside_median(
    facts: Sequence[RankFacts], value: Callable[[RankFacts], float | None], kind: Callable[[RankFacts], str]
) -> Iterator[tuple[RankFacts, float]]:
    """Each rank that has a value, with the median of the ranks of its kind. Of two middle values the larger counts."""
    groups: dict[str, list[tuple[RankFacts, float]]] = {}
    for each in facts:
        number = value(each)
        if number is not None:
            groups.setdefault(kind(each), []).append((each, number))
    for group in groups.values():
        median = median_high(number for _, number in group)
        if median > 0:
            yield from ((each, median) for each, _ in group)


def _nodes(facts: Sequence[RankFacts], all_facts: Sequence[RankFacts]) -> set[int]:
    numbers = nodes_of(all_facts)
    return {numbers[each.rank] for each in facts}


def _first_of_nodes(facts: Sequence[RankFacts], all_facts: Sequence[RankFacts]) -> Iterator[RankFacts]:
    """The first of ``facts`` on each node."""
    numbers, seen = nodes_of(all_facts), set()
    for each in sorted(facts, key=lambda one: one.rank):
        if numbers[each.rank] not in seen:
            seen.add(numbers[each.rank])
            yield each
