"""Pipeline schedules as tables: what each stage computes, in which order. Torch-free.

The executor runs a table, a planner can time it, a memory model can count its live activations. A new schedule is one
pure function that returns a table; what is sent between the stages follows from the table (``exchanges``), and
``check`` says whether it can run at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """What a stage does with one micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One computation of one stage. ``chunk`` tells apart several model chunks on a stage; always 0 in 1F1B."""

    kind: ActionKind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class PipelineSchedule:
    """``stages[i]`` is what stage i computes, in order."""

    num_micro_batches: int
    stages: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.stages)


class ScheduleError(ValueError):
    """A table that cannot run, or not within its memory; the message names stage and action."""


@dataclass(frozen=True)
class Message:
    """Activations (after a forward) or their gradients (after a backward) on the way to a neighbouring stage."""

    kind: ActionKind
    micro_batch: int
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch} from stage {self.source} to stage {self.destination}"


@dataclass(frozen=True)
class Exchange:
    """An action with the message it waits for and the message it gives; None at the ends of the pipeline."""

    action: Action
    receive: Message | None
    send: Message | None


def one_f_one_b(pp: int, num_micro_batches: int) -> PipelineSchedule:
    """One forward, one backward in turn, after a warmup that fills the pipeline.

    Stage i runs ``pp - i - 1`` forwards ahead and so never keeps the activations of more than ``pp - i``
    micro-batches. Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", section 2.2 (PipeDream-Flush).
    """

    def actions(stage: int) -> tuple[Action, ...]:
        warmup = min(pp - stage - 1, num_micro_batches)
        table = [Action(ActionKind.FORWARD, i) for i in range(warmup)]
        for i in range(num_micro_batches - warmup):
            table += [Action(ActionKind.FORWARD, warmup + i), Action(ActionKind.BACKWARD, i)]
        table += [Action(ActionKind.BACKWARD, i) for i in range(num_micro_batches - warmup, num_micro_batches)]
        return tuple(table)

    return PipelineSchedule(num_micro_batches, tuple(actions(stage) for stage in range(pp)))


def all_forward(pp: int, num_micro_batches: int) -> PipelineSchedule:
    """Every stage forwards the micro-batches in order: evaluation and generation."""
    row = tuple(Action(ActionKind.FORWARD, i) for i in range(num_micro_batches))
    return PipelineSchedule(num_micro_batches, (row,) * pp)


def exchanges(schedule: PipelineSchedule, stage: int) -> tuple[Exchange, ...]:
    """The actions of a stage, each with what it waits for and what it gives."""
    last = len(schedule.stages) - 1

    def exchange(action: Action) -> Exchange:
        step = 1 if action.kind is ActionKind.FORWARD else -1
        source, destination = stage - step, stage + step
        receive = Message(action.kind, action.micro_batch, source, stage) if 0 <= source <= last else None
        send = Message(action.kind, action.micro_batch, stage, destination) if 0 <= destination <= last else None
        return Exchange(action, receive, send)

    return tuple(exchange(action) for action in schedule.stages[stage])


def live_activations(schedule: PipelineSchedule, stage: int) -> int:
    """Most micro-batches that a stage holds activations of at one time: forwarded and not yet sent backward."""
    live = most = 0
    for action in schedule.stages[stage]:
        live += 1 if action.kind is ActionKind.FORWARD else -1
        most = max(most, live)
    return most


def check(schedule: PipelineSchedule) -> None:
    """Refuse a training table that is incomplete, out of order, too hungry or that would wait for ever.

    Raises:
        ScheduleError: names the first thing that is wrong.
    """
    for stage in range(len(schedule.stages)):
        _check_actions(schedule, stage)
        bound = len(schedule.stages) - stage
        if live_activations(schedule, stage) > bound:
            raise ScheduleError(f"stage {stage} holds {live_activations(schedule, stage)} micro-batches, over {bound}")
    _check_message_order(schedule)
    _check_rendezvous(schedule)


def _check_actions(schedule: PipelineSchedule, stage: int) -> None:
    actions = schedule.stages[stage]
    forwards = [action.micro_batch for action in actions if action.kind is ActionKind.FORWARD]
    backwards = [action.micro_batch for action in actions if action.kind is ActionKind.BACKWARD]
    expected = list(range(schedule.num_micro_batches))
    if sorted(forwards) != expected or sorted(backwards) != expected:
        raise ScheduleError(f"stage {stage} does not run every micro-batch forward and backward exactly once")
    for micro_batch in expected:
        forward, backward = (actions.index(Action(kind, micro_batch)) for kind in ActionKind)
        if backward < forward:
            raise ScheduleError(f"stage {stage} runs B{micro_batch} before F{micro_batch}")


def _check_message_order(schedule: PipelineSchedule) -> None:
    """Between two stages messages must be received in the order they are sent: NCCL has no tags to tell them apart."""
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for stage in range(len(schedule.stages)):
        for exchange in exchanges(schedule, stage):
            for message, log in ((exchange.send, sent), (exchange.receive, received)):
                if message is not None:
                    log[message.source, message.destination].append(message)
    for pair in sent.keys() | received.keys():
        if sent[pair] != received[pair]:
            raise ScheduleError(f"stage {pair[1]} receives in another order than stage {pair[0]} sends")


def _check_rendezvous(schedule: PipelineSchedule) -> None:
    """No deadlock even where a send blocks until it is received, as in a batch of NCCL sends and receives.

    Between two actions a stage posts the send of the one and the receive of the other together, and goes on when both
    have met their partner. Simulated by completing, again and again, every message that both of its ends have posted.
    """
    pending = [_batches(schedule, stage) for stage in range(len(schedule.stages))]
    while any(pending):
        posted = [batches[0] if batches else frozenset() for batches in pending]
        met = {m for m in frozenset().union(*posted) if m in posted[m.source] and m in posted[m.destination]}
        if not met:
            stuck = next(stage for stage, ours in enumerate(posted) if ours)
            raise ScheduleError(f"deadlock: stage {stuck} waits for ever for {min(map(str, posted[stuck]))}")
        pending = [[ours - met, *batches[1:]] for ours, batches in zip(posted, pending, strict=True)]
        pending = [batches if batches[0] else batches[1:] for batches in pending]


def _batches(schedule: PipelineSchedule, stage: int) -> list[frozenset[Message]]:
    """What a stage sends and receives together: before its first action, between any two, and after the last."""
    row = exchanges(schedule, stage)
    sends = [None, *(exchange.send for exchange in row)]
    receives = [*(exchange.receive for exchange in row), None]
    batches = (frozenset(m for m in pair if m is not None) for pair in zip(sends, receives, strict=True))
    return [batch for batch in batches if batch]


def timeline(
    schedule: PipelineSchedule, durations: Mapping[ActionKind, float]
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Start and end of every action of every stage, where messages take no time.

    Raises:
        ScheduleError: some action never gets what it waits for.
    """
    rows = [list(exchanges(schedule, stage)) for stage in range(len(schedule.stages))]
    times: list[list[tuple[float, float]]] = [[] for _ in rows]
    arrived: dict[Message, float] = {}
    progress = True
    while progress:
        progress = False
        for row, done in zip(rows, times, strict=True):
            while len(done) < len(row) and (row[len(done)].receive is None or row[len(done)].receive in arrived):
                exchange, free = row[len(done)], done[-1][1] if done else 0.0
                start = max(free, arrived[exchange.receive] if exchange.receive else 0.0)
                end = start + durations[exchange.action.kind]
                done.append((start, end))
                if exchange.send is not None:
                    arrived[exchange.send] = end
                progress = True
    for stage, (row, done) in enumerate(zip(rows, times, strict=True)):
        if len(done) < len(row):
            raise ScheduleError(f"deadlock: stage {stage} never gets what {row[len(done)].action} waits for")
    return tuple(tuple(done) for done in times)
