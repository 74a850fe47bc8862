"""The preflight of a job: all ranks measure side by side, rank 0 judges, and all learn the verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.preflight import measuring
from trainer.preflight.exchange import Exchange, LateError, bounded
from trainer.preflight.facts import FolderFacts, RankFacts, nodes_of
from trainer.preflight.judgement import Finding, Trial, judge, ordered
from trainer.preflight.pairs import judge_trials, rounds
from trainer.preflight.reduction import reduce_over
from trainer.process.failure import NodeError, PeerFailedError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LIMIT_S = 60.0
"""Time limit of the whole preflight, on any number of nodes."""
_HELLO_S, _MEASURE_S, _AGAIN_S, _REDUCE_S, _PAIR_S, _READ_S = 3.0, 10.0, 4.0, 20.0, 3.0, 3.0
"""Time limits of the stages, the fifth one of each round. NCCL opens its connections in the all-reduce over all."""
_MOST_NAMED = 4
_ANSWER_S = 1.0
"""Time after the limit of a measurement until rank 0 counts its rank as missing."""


@dataclass(frozen=True)
class Seat:
    """Place of a rank in the job.

    Attributes:
        devices_asked: number of devices per node that the job has asked for; None if unknown.
        folders: names and paths of the folders that the run writes.
        save_bytes: bytes of a checkpoint at the least; 0 if unknown.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    device: torch.device
    devices_asked: int | None = None
    folders: tuple[tuple[str, Path], ...] = ()
    save_bytes: int = 0


@dataclass(frozen=True)
class Instruments:
    """The measurements, each of which may wait for a device, a file system or a peer."""

    speed: Callable[[torch.device, bool], float] = measuring.product_speed
    kind: Callable[[torch.device], str] = measuring.kind_of_device
    devices: Callable[[torch.device, int], int] = measuring.device_count
    memory: Callable[[torch.device], tuple[float | None, float | None]] = measuring.device_memory
    host_memory: Callable[[], float | None] = measuring.host_memory_free
    reported: Callable[[torch.device], tuple[str, str]] = measuring.reported_errors
    write: Callable[[Sequence[tuple[str, Path]], int], tuple[FolderFacts, ...]] = measuring.write_folders
    clock: Callable[[], float] = time.time
    reduce: Callable[[Store, Sequence[int], int, torch.device, float], str] = reduce_over


@dataclass
class Verdict:
    """Result of a preflight.

    Attributes:
        findings: the fatal ones first.
        facts: of all ranks, in order; on rank 0 alone.
        speaker: rank that reports a failure: the one that the finding is on, or rank 0 for a rank without an answer.
        seconds: time taken.
    """

    findings: list[Finding] = field(default_factory=list)
    facts: list[RankFacts] = field(default_factory=list)
    speaker: int = 0
    seconds: float = 0.0

    @property
    def failure(self) -> Finding | None:
        """The finding that ends the attempt; None if there is none."""
        return self.findings[0] if self.findings and self.findings[0].is_fatal else None

    @property
    def culprits(self) -> tuple[str, ...]:
        """Names of all nodes at fault; empty if the failure is that of a folder or a setting."""
        if self.failure is None or not self.failure.culprits:
            return ()
        return tuple(dict.fromkeys(name for each in self.findings if each.is_fatal for name in each.culprits))

    def as_plain(self) -> dict[str, Any]:
        """Content of preflight.json."""
        found = [each.as_plain() for each in self.findings]
        facts = [json.loads(each.as_text()) for each in self.facts]
        ends = self.failure is not None
        return {"passed": not ends, "seconds": round(self.seconds, 3), "findings": found, "ranks": facts}


def check_nodes(seat: Seat, store: Store, instruments: Instruments | None = None) -> Verdict:
    """Measure, and let rank 0 judge; every rank returns the same findings. Collective: all ranks.

    Args:
        seat: of this rank.
        store: of the rendezvous, with a prefix of this preflight.
        instruments: the measurements; None: the real ones.

    Raises:
        RuntimeError: rank 0 does not answer.
    """
    preflight = _Preflight(seat, store, instruments or Instruments())
    return preflight.lead() if seat.rank == 0 else preflight.follow()


def raise_failure(verdict: Verdict, rank: int) -> None:
    """Raise if a finding ends the attempt.

    Raises:
        NodeError: on the rank that reports the finding.
        PeerFailedError: on all other ranks.
    """
    failure = verdict.failure
    if failure is None:
        return
    if rank == verdict.speaker:
        others = [name for name in verdict.culprits if name not in failure.culprits]
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        also = f"; also unfit: {', '.join(others[:_MOST_NAMED])}{more}" if others else ""
        raise NodeError(f"preflight: {failure.sentence()}{also}", verdict.culprits)
    raise PeerFailedError(f"the preflight has failed; rank {verdict.speaker} reports the cause")


def default_store(name: str) -> Store:
    """The store of the default process group, with a prefix."""
    store: Store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    return store


def _left(begun: float, seconds: float) -> float:
    """Seconds left for the others' answers after this rank's own one."""
    return max(begun + seconds - time.monotonic(), 0.0) + _ANSWER_S


class _Preflight:
    """One preflight on one rank. Rank 0 leads: it ends each stage, also if a rank does not answer."""

    def __init__(self, seat: Seat, store: Store, instruments: Instruments) -> None:
        self._seat, self._store, self._tools = seat, store, instruments
        self._began = time.monotonic()
        self._exchange = Exchange(store, seat.rank, seat.world_size, LIMIT_S)
        self._ranks = range(seat.world_size)

    def lead(self) -> Verdict:
        """Lead all ranks through the stages, and tell them the verdict. For rank 0."""
        exchange, seat = self._exchange, self._seat
        exchange.put("hello", RankFacts(0, seat.host, seat.local_rank).as_text())
        hello = self._facts("hello", _HELLO_S)
        exchange.end("hello")
        begun = time.monotonic()
        exchange.put("facts", self._measure().as_text())
        facts = self._again(self._facts("facts", _left(begun, _MEASURE_S)))
        findings = [*self._missing(facts, hello), *judge(facts, seat.save_bytes)]
        if seat.world_size == 1 or any(each.is_fatal for each in findings):
            exchange.end("plan", "null")
        else:
            findings += self._reductions(facts)
        verdict = Verdict(ordered(findings), facts)
        answered = {each.rank for each in facts}
        if verdict.failure is not None and verdict.failure.rank in answered:
            verdict.speaker = verdict.failure.rank
        verdict.seconds = time.monotonic() - self._began
        plain = {"findings": [vars(each) for each in verdict.findings], "speaker": verdict.speaker}
        exchange.end("verdict", json.dumps(plain))
        # Rank 0 may hold the store: it stays until all have read.
        exchange.put("read", "")
        exchange.collect("read", sorted(answered), _READ_S)
        return verdict

    def follow(self) -> Verdict:
        """Measure as rank 0 asks; the verdict. For all other ranks."""
        exchange, seat = self._exchange, self._seat
        exchange.put("hello", RankFacts(seat.rank, seat.host, seat.local_rank).as_text())
        exchange.await_end("hello", LIMIT_S)
        exchange.put("facts", self._measure().as_text())
        slow = json.loads(exchange.await_end("again", LIMIT_S))
        if seat.rank in slow:
            exchange.put("speed", json.dumps(self._speed(is_again=True)))
        plan = json.loads(exchange.await_end("plan", LIMIT_S))
        if plan:
            self._reduce_and_tell("all", plan["ranks"], _REDUCE_S)
            if exchange.await_end("all", LIMIT_S):
                for number, groups in enumerate(plan["rounds"]):
                    self._take_part(number, groups, plan["nodes"])
                    exchange.await_end(f"round{number}", LIMIT_S)
        values = json.loads(exchange.await_end("verdict", LIMIT_S))
        exchange.put("read", "")
        findings = [Finding(**{**each, "culprits": tuple(each["culprits"])}) for each in values["findings"]]
        return Verdict(findings, speaker=values["speaker"], seconds=time.monotonic() - self._began)

    def _facts(self, stage: str, seconds: float) -> list[RankFacts]:
        texts = self._exchange.collect(stage, self._ranks, seconds)
        found = [RankFacts.from_text(text, rank) for rank, text in sorted(texts.items())]
        return [each for each in found if each is not None]

    def _missing(self, facts: Sequence[RankFacts], hello: Sequence[RankFacts]) -> list[Finding]:
        hosts = {each.rank: each.host for each in hello}
        lost = sorted(set(self._ranks) - {each.rank for each in facts})
        remedy = "leave the node out with --exclude, and tell the administrators"
        return [
            Finding(
                rank,
                hosts.get(rank, "of an unknown name"),
                "measurements",
                f"no answer after {_MEASURE_S:.0f} s",
                "an answer",
                remedy,
                culprits=(hosts[rank],) if rank in hosts else (),
            )
            for rank in lost
        ]

    def _measure(self) -> RankFacts:
        """Facts of this rank, in at most _MEASURE_S."""
        seat, clock = self._seat, self._tools.clock()
        bare = RankFacts(seat.rank, seat.host, seat.local_rank, clock=clock)
        try:
            return bounded(lambda: self._all_facts(clock), _MEASURE_S, "measurements")
        except LateError as error:
            return RankFacts(**{**vars(bare), "problem": str(error)})
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return RankFacts(**{**vars(bare), "problem": text[:300]})

    def _all_facts(self, clock: float) -> RankFacts:
        seat, tools = self._seat, self._tools
        free, total = tools.memory(seat.device)
        broken, worn = tools.reported(seat.device)
        is_first = seat.local_rank == 0
        return RankFacts(
            seat.rank,
            seat.host,
            seat.local_rank,
            device=tools.kind(seat.device),
            is_gpu=seat.device.type == "cuda",
            devices=tools.devices(seat.device, seat.local_world_size),
            devices_asked=seat.devices_asked,
            speed=tools.speed(seat.device, False),
            memory_free=free,
            memory_total=total,
            host_memory_free=tools.host_memory() if is_first else None,
            clock=clock,
            folders=tools.write(seat.folders, seat.rank) if is_first else (),
            broken=broken,
            worn=worn,
        )

    def _speed(self, *, is_again: bool) -> float | None:
        try:
            return bounded(lambda: self._tools.speed(self._seat.device, is_again), _AGAIN_S, "speed")
        except Exception:  # the first measurement stands
            return None

    def _again(self, facts: list[RankFacts]) -> list[RankFacts]:
        """Let slow ranks measure again, and take their better speed."""
        slow = sorted({each.rank for each in judge(facts) if each.what == "speed of a matrix product"})
        self._exchange.end("again", json.dumps(slow))
        if not slow:
            return facts
        begun = time.monotonic()
        if 0 in slow:
            self._exchange.put("speed", json.dumps(self._speed(is_again=True)))
        texts = self._exchange.collect("speed", slow, _left(begun, _AGAIN_S))
        better = {rank: json.loads(text) or 0.0 for rank, text in texts.items()}
        return [
            RankFacts(**{**vars(each), "speed": max(each.speed or 0.0, better.get(each.rank, 0.0)) or None})
            for each in facts
        ]

    def _reductions(self, facts: Sequence[RankFacts]) -> list[Finding]:
        """Findings of the all-reduces; rank 0 ends their stages."""
        exchange, ranks = self._exchange, [each.rank for each in facts]
        numbers = nodes_of(facts)
        first = {numbers[each.rank]: (each.rank, each.host) for each in sorted(facts, key=lambda one: -one.rank)}
        plan: dict[str, Any] = {"ranks": ranks, "nodes": [numbers[rank] for rank in ranks]}
        plan["rounds"] = rounds(len(first))
        exchange.end("plan", json.dumps(plan))
        begun = time.monotonic()
        self._reduce_and_tell("all", ranks, _REDUCE_S)
        whole = Trial((), exchange.collect("all", ranks, _left(begun, _REDUCE_S)), tuple(ranks))
        exchange.end("all", "" if whole.is_right else "wrong")
        trials: list[Trial] = []
        for number, groups in enumerate(plan["rounds"] if not whole.is_right else ()):
            begun = time.monotonic()
            self._take_part(number, groups, plan["nodes"])
            taking = [rank for rank in ranks if any(numbers[rank] in group for group in groups)]
            answers = exchange.collect(f"round{number}", taking, _left(begun, _PAIR_S))
            for group in groups:
                members = tuple(rank for rank in ranks if numbers[rank] in group)
                mine = {rank: answers[rank] for rank in members if rank in answers}
                trials.append(Trial(tuple(group), mine, members))
            exchange.end(f"round{number}")
        return judge_trials(whole, trials, first)

    def _take_part(self, number: int, groups: Sequence[Sequence[int]], nodes: Sequence[int]) -> None:
        """Take part in a round with the group of this rank's node, if there is one."""
        mine = next((group for group in groups if nodes[self._seat.rank] in group), None)
        if mine is not None:
            members = [rank for rank, node in enumerate(nodes) if node in mine]
            self._reduce_and_tell(f"round{number}", members, _PAIR_S)

    def _reduce_and_tell(self, stage: str, ranks: Sequence[int], seconds: float) -> None:
        store = dist.PrefixStore(f"{stage}/{min(ranks)}", self._store)  # type: ignore[attr-defined]
        self._exchange.put(stage, self._tools.reduce(store, ranks, self._seat.rank, self._seat.device, seconds))
