"""Tables of pipeline schedules: actions of each rank, and resulting messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from trainer.planning.schedule.placement import Placement


class ActionKind(Enum):
    """Kind of computation on one micro-batch in one model chunk.

    Backward is either one action or, in zero-bubble schedules, two: the gradient of the input, which the previous stage
    waits for, and the gradients of the weights, which no stage waits for (Qi et al. 2023, arXiv:2401.10241).
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    # Members are singletons; Enum hashes their names, in Python, for each of the many look-ups by kind.
    __hash__ = object.__hash__

    @property
    def gives_input_gradient(self) -> bool:
        """True if the action yields the gradient that the previous stage waits for."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)

    @property
    def frees_activations(self) -> bool:
        """True if the rank keeps no activation of the micro-batch after the action."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Action:
    """One computation of one rank.

    ``chunk`` is the number of the model chunk on the rank.
    """

    kind: ActionKind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class ActivationBound:
    """Bounds on the activations that a rank holds, counted per micro-batch and model chunk.

    Attributes:
        live: activations held from the forward until the gradient of the input.
        kept: activations held from the forward until the gradients of the weights; equal to ``live`` if backward is
            not split.
    """

    live: int
    kept: int


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule table: ``stages[i]`` are the actions of pipeline rank i, in order.

    Attributes:
        num_micro_batches: micro-batches of one replica per iteration.
        stages: one row per pipeline rank.
        placement: placement of the virtual stages on the ranks.
        bounds: activation bounds of each rank; empty if nothing is kept, as in evaluation.
    """

    num_micro_batches: int
    stages: tuple[tuple[Action, ...], ...]
    placement: Placement
    bounds: tuple[ActivationBound, ...] = ()

    def __hash__(self) -> int:
        # Cached functions hash the table in every step, so hashing all actions would be slow.
        return hash((self.num_micro_batches, self.placement, tuple(map(len, self.stages))))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.stages)


@dataclass(frozen=True)
class Message:
    """Activations (forward) or their gradients (backward) sent between neighbouring virtual stages.

    Attributes:
        kind: FORWARD or BACKWARD.
        micro_batch: number of the micro-batch.
        virtual_stage: the receiving virtual stage. Kind, micro-batch and virtual stage identify a message.
        source: sending pipeline rank.
        destination: receiving pipeline rank; if it equals the source, nothing is sent.
    """

    kind: ActionKind
    micro_batch: int
    virtual_stage: int
    source: int
    destination: int

    @property
    def is_local(self) -> bool:
        """True if source and destination are the same rank."""
        return self.source == self.destination

    def __str__(self) -> str:
        of = f"{self.kind.value}{self.micro_batch} for virtual stage {self.virtual_stage}"
        return f"{of} from rank {self.source} to rank {self.destination}"


@dataclass(frozen=True)
class Exchange:
    """An action with the messages it receives and sends.

    The messages are None at the ends of the pipeline.

    Either message may be local, from a rank to itself.
    """

    action: Action
    receive: Message | None
    send: Message | None


@lru_cache(maxsize=32)
def exchanges(schedule: PipelineSchedule, rank: int) -> tuple[Exchange, ...]:
    """Actions of a pipeline rank, each with the messages it receives and sends."""
    return tuple(_exchange(schedule.placement, rank, action) for action in schedule.stages[rank])


def _exchange(placement: Placement, rank: int, action: Action) -> Exchange:
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return Exchange(action, None, None)
    kind = ActionKind.FORWARD if action.kind is ActionKind.FORWARD else ActionKind.BACKWARD
    here = placement.virtual_stage(rank, action.chunk)
    step = 1 if kind is ActionKind.FORWARD else -1

    def message(source: int, destination: int) -> Message | None:
        if not (0 <= source < placement.num_virtual_stages and 0 <= destination < placement.num_virtual_stages):
            return None
        ranks = placement.place(source)[0], placement.place(destination)[0]
        return Message(kind, action.micro_batch, destination, *ranks)

    return Exchange(action, receive=message(here - step, here), send=message(here, here + step))


def message_count(schedule: PipelineSchedule) -> int:
    """Number of messages between different ranks in one run of the table."""
    return sum(
        exchange.send is not None and not exchange.send.is_local
        for rank in range(len(schedule.stages))
        for exchange in exchanges(schedule, rank)
    )


def live_activations(schedule: PipelineSchedule, rank: int) -> int:
    """Peak number of activations between their forward and the gradient of their input.

    An activation is that of one micro-batch in one model chunk.
    """
    return _most(schedule, rank, lambda kind: kind.gives_input_gradient)


def kept_activations(schedule: PipelineSchedule, rank: int) -> int:
    """Peak number of activations between their forward and the gradients of the weights.

    An activation is that of one micro-batch in one model chunk. After the gradient of its input only the factors of
    the weight gradients are kept: the inputs of the linear layers and the gradients of their outputs.
    """
    return _most(schedule, rank, lambda kind: kind.frees_activations)


def _most(schedule: PipelineSchedule, rank: int, ends: Callable[[ActionKind], bool]) -> int:
    count = most = 0
    for action in schedule.stages[rank]:
        count += (action.kind is ActionKind.FORWARD) - ends(action.kind)
        most = max(most, count)
    return most
