"""Ranks that hang, from the heartbeats of a run. Pure."""

from collections.abc import Sequence

from llmctl.durations import duration_text
from llmctl.runs.facts import Heartbeat
from llmctl.supervisor.hangs.waiting import SIGN_S, Point, find_hang, patience_s

KERNEL_BUILD = "building the kernels"
"""Phase of a training that has no kernels yet (trainer/process/heartbeat.py)."""
STALLED_S = 30.0
"""A rank is reported if it lags by this much and by three iterations' time; saves and evaluations are shorter."""


def lagging_ranks(heartbeats: Sequence[Heartbeat], now: float, iteration_time_s: float | None) -> str:
    """One sentence on hanging ranks; empty if no rank hangs.

    A heartbeat's time is the moment of the rank's last progress. A rank that hangs blocks the others in their next
    collective, so that all heartbeats age: the numbers of the collectives tell who waits for whom. Without them, as in
    heartbeats of older versions, the ranks named then are those at the earliest point of the run.
    """
    hang = find_hang([_point(beat, now) for beat in heartbeats], iteration_time_s)
    if hang is not None:
        return hang.sentence
    behind, is_alone = _ranks_behind(heartbeats, now, iteration_time_s)
    if not behind:
        return ""
    if is_alone:
        silent = duration_text(now - min(beat.time for beat in behind))
        return f"{name_ranks(behind)}: no heartbeat for {silent}; the other ranks continue"
    newest = max(_of_interest(heartbeats), key=lambda heartbeat: heartbeat.time)
    silent = duration_text(now - newest.time)
    if len(behind) == len(_of_interest(heartbeats)):
        return f"no heartbeat for {silent}: all ranks in phase {newest.phase} of iteration {newest.iteration}"
    return f"no heartbeat for {silent}; the other ranks wait for {name_ranks(behind)}"


def hanging_ranks(heartbeats: Sequence[Heartbeat], now: float, iteration_time_s: float | None) -> set[int]:
    """The ranks that hang, without those that wait for them."""
    hang = find_hang([_point(beat, now) for beat in heartbeats], iteration_time_s)
    if hang is not None:
        return set(hang.causes)
    return {beat.rank for beat in _ranks_behind(heartbeats, now, iteration_time_s)[0]}


def hang_at_end(heartbeats: Sequence[Heartbeat], end: float, iteration_time_s: float | None) -> str:
    """The sentence on ranks that hung when their attempt ended; empty if none did.

    What the ranks did after the last sign of life of all is not known: their ends may have taken a while.
    """
    last = max((beat.written for beat in heartbeats if beat.written is not None), default=end)
    return lagging_ranks(heartbeats, min(end, last + SIGN_S), iteration_time_s)


def _point(beat: Heartbeat, now: float) -> Point:
    unwritten_s = now - beat.written if beat.written is not None else 0.0
    return Point(
        rank=beat.rank,
        host=beat.host,
        iteration=beat.iteration,
        phase=beat.phase,
        silent_s=now - beat.time,
        unwritten_s=unwritten_s,
        groups=dict(beat.groups),
        inside=beat.inside,
        group=beat.group,
        is_first_step=beat.first_iteration is not None and beat.iteration <= beat.first_iteration,
        network=beat.network,
    )


def _ranks_behind(
    heartbeats: Sequence[Heartbeat], now: float, iteration_time_s: float | None
) -> tuple[list[Heartbeat], bool]:
    """The hanging ranks, and True if the others continue. All ranks if all stopped at the same point."""
    if not heartbeats:
        return [], False
    heartbeats = _of_interest(heartbeats)
    patience = max(STALLED_S, 3 * (iteration_time_s or 0.0))
    if any(beat.written is not None for beat in heartbeats):
        patience = max(patience, *(patience_s(_point(beat, now), iteration_time_s) for beat in heartbeats))
    newest = max(heartbeats, key=lambda heartbeat: heartbeat.time)
    behind = [heartbeat for heartbeat in heartbeats if newest.time - heartbeat.time > patience]
    if behind or now - newest.time <= patience:
        return behind, True
    first = min(heartbeats, key=lambda heartbeat: (heartbeat.iteration, heartbeat.time))
    return [beat for beat in heartbeats if (beat.iteration, beat.phase) == (first.iteration, first.phase)], False


def _of_interest(heartbeats: Sequence[Heartbeat]) -> Sequence[Heartbeat]:
    # While some ranks build, the others wait for them: their heartbeats may be as old as the build.
    return [beat for beat in heartbeats if _builds(beat)] or heartbeats


def _builds(beat: Heartbeat) -> bool:
    """True if a rank is compiling kernels, which it shows as a percentage."""
    return beat.phase.startswith(KERNEL_BUILD) and beat.phase.endswith("%")


def build_progress(heartbeats: Sequence[Heartbeat]) -> str:
    """``building the kernels 40%``, of the rank that is furthest from the end; empty if no rank builds."""
    phases = [beat.phase for beat in heartbeats if _builds(beat)]
    return min(phases, key=lambda phase: int(phase.split()[-1].rstrip("%")), default="")


def name_ranks(heartbeats: Sequence[Heartbeat], limit: int = 4) -> str:
    """Rank, host, phase and iteration of ``limit`` ranks, those that stopped first, and the number of the others."""
    named = sorted(heartbeats, key=lambda heartbeat: (heartbeat.time, heartbeat.rank))[:limit]
    words = [f"rank {beat.rank} on {beat.host} (phase {beat.phase}, iteration {beat.iteration})" for beat in named]
    more = len(heartbeats) - len(named)
    return ", ".join(words) + (f" and {more} more" if more else "")
