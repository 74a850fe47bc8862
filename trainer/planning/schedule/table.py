"""A pipeline schedule as data: what each rank computes in which order, and the messages that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from trainer.planning.schedule.placement import Placement


class ActionKind(Enum):
    """What a rank does with one micro-batch in one of its chunks.

    The backward is either one action or, in zero-bubble schedules, two: the gradient of the input, which the stage
    before waits for, and the gradients of the weights, which nobody waits for (Qi et al. 2023, arXiv:2401.10241).
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    @property
    def gives_input_gradient(self) -> bool:
        """Whether the stage before can go on after it."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)

    @property
    def frees_activations(self) -> bool:
        """Whether nothing of the micro-batch is left on the rank after it."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Action:
    """One computation of one rank. ``chunk`` tells apart the virtual stages that lie on it."""

    kind: ActionKind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class ActivationBound:
    """What a rank may hold at one time, in activations of one micro-batch in one chunk.

    Attributes:
        live: from the forward until the gradient of the input.
        kept: from the forward until the gradients of the weights; the same as ``live`` where backward is not split.
    """

    live: int
    kept: int


@dataclass(frozen=True)
class PipelineSchedule:
    """``stages[i]`` is what pipeline rank i computes, in order.

    Attributes:
        num_micro_batches: of one replica in one iteration.
        stages: one row per pipeline rank.
        placement: which virtual stage each chunk of each rank is.
        bounds: what each rank may hold; empty where nothing is kept, as in evaluation.
    """

    num_micro_batches: int
    stages: tuple[tuple[Action, ...], ...]
    placement: Placement
    bounds: tuple[ActivationBound, ...] = ()

    def __hash__(self) -> int:
        # A long table is looked up in every step by what is worked out once for it.
        return hash((self.num_micro_batches, self.placement, tuple(map(len, self.stages))))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.stages)


@dataclass(frozen=True)
class Message:
    """Activations (of a forward) or their gradients (of a backward) on the way between neighbouring virtual stages.

    Attributes:
        kind: FORWARD or BACKWARD.
        micro_batch: whose.
        virtual_stage: the one that waits for it. Kind, micro-batch and virtual stage tell messages from one another.
        source: pipeline rank.
        destination: pipeline rank; where it is the source as well, nothing travels.
    """

    kind: ActionKind
    micro_batch: int
    virtual_stage: int
    source: int
    destination: int

    @property
    def is_local(self) -> bool:
        """Handed over on one rank."""
        return self.source == self.destination

    def __str__(self) -> str:
        of = f"{self.kind.value}{self.micro_batch} for virtual stage {self.virtual_stage}"
        return f"{of} from rank {self.source} to rank {self.destination}"


@dataclass(frozen=True)
class Exchange:
    """An action with the message it waits for and the message it gives; None at the ends of the pipeline.

    Either may be local: then the rank hands it over to itself.
    """

    action: Action
    receive: Message | None
    send: Message | None


@lru_cache(maxsize=32)
def exchanges(schedule: PipelineSchedule, rank: int) -> tuple[Exchange, ...]:
    """The actions of a pipeline rank, each with what it waits for and what it gives."""
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
    """Messages between different ranks in one run of the table."""
    return sum(
        exchange.send is not None and not exchange.send.is_local
        for rank in range(len(schedule.stages))
        for exchange in exchanges(schedule, rank)
    )


def live_activations(schedule: PipelineSchedule, rank: int) -> int:
    """Most activations (of one micro-batch in one chunk) between their forward and the gradient of their input."""
    return _most(schedule, rank, lambda kind: kind.gives_input_gradient)


def kept_activations(schedule: PipelineSchedule, rank: int) -> int:
    """Most activations (of one micro-batch in one chunk) of which anything is kept: until the weights' gradients.

    What is left of one after the gradient of its input are the factors of the weight gradients: the inputs of the
    linear layers and the gradients of their outputs.
    """
    return _most(schedule, rank, lambda kind: kind.frees_activations)


def _most(schedule: PipelineSchedule, rank: int, ends: Callable[[ActionKind], bool]) -> int:
    count = most = 0
    for action in schedule.stages[rank]:
        count += (action.kind is ActionKind.FORWARD) - ends(action.kind)
        most = max(most, count)
    return most
