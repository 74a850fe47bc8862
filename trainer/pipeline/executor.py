"""Execution of a pipeline schedule table on one rank: training step, evaluation, logits.

Legend: S sequence, B micro-batch, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data.samples.further_tokens import with_further_tokens
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.step_timers import StepTimers, measured
from trainer.pipeline.communication import PipelinePeers, build_communicator
from trainer.pipeline.seeded_backward import SeededBackward
from trainer.pipeline.weight_gradients import WeightGradientQueue, deferring
from trainer.planning.schedule import Action, ActionKind, PipelineSchedule, all_forward, build_schedule

if TYPE_CHECKING:
    from trainer.distributed.random_streams import StepRandomness
    from trainer.model.cache import KeyValueCache
    from trainer.parallel_model import ParallelModel


def forward_backward(
    model: ParallelModel,
    micro_batches: Sequence[MicroBatch],
    *,
    valid_tokens: int | Sequence[int],
    loss_scale: float,
    randomness: StepRandomness,
    timers: StepTimers | None = None,
) -> Tensor:
    """Forward and backward of this replica's part of one global batch. Collective: all ranks.

    The gradient is that of ``loss_scale * (sum of token losses over the global batch) / valid_tokens``, plus the mean
    over the micro-batches of auxiliary losses, if layers have any, and the losses of trainer.model.mtp. There are no
    other divisions: micro-batches and replicas are summed, so that every token has the same weight in every layout. A
    model with several terms of the loss, such as BERT, adds them up, each with its own divisor.

    Args:
        model: afterwards its main gradients are final, still multiplied by ``loss_scale``.
        micro_batches: this replica's, in order, with whole sequences; the same on each of its ranks. Their lengths and
            sizes may differ.
        valid_tokens: tokens under the loss in the whole global batch, over all replicas; of a model with several
            terms, the labels of each (MicroBatch.loss_counts).
        loss_scale: factor that prevents underflow of fp16 gradients; 1 otherwise.
        randomness: dropout streams of this iteration.
        timers: of the parts of the step.

    Returns:
        Sum of the token losses of this rank's part of its micro-batches, float64 scalar, neither averaged nor scaled;
        0 on all ranks outside the last stage. With several terms [terms], the sum of each.
    """
    model.gradients.begin(len(micro_batches))
    aux_loss_scale = loss_scale / (len(micro_batches) * model.mesh.dp)
    # The shift of multi-token prediction needs whole sequences.
    depths = model.prediction_depths if model.mesh.computes_loss else 0
    micro_batches = [model.axes.cp.shard_micro_batch(with_further_tokens(batch, depths)) for batch in micro_batches]
    factors = _loss_factors(loss_scale, valid_tokens, _device(model))
    training = TrainingStep(model, micro_batches, factors, aux_loss_scale, randomness, timers)
    training.run(build_schedule(model.schedule, model.placement.pp, model.placement.chunks, len(micro_batches)))
    with measured(timers, "gradient_sync"):
        model.gradients.finish()
    return training.loss_sum


def run_row(
    schedule: PipelineSchedule,
    rank: int,
    peers: PipelinePeers | None,
    perform: Callable[[Action, Tensor | None], Tensor | None],
    timers: StepTimers | None = None,
) -> None:
    """Run one rank's row of a table.

    Collective: all ranks of the pipeline, each with its own row.

    Args:
        schedule: a table that ``check`` accepts.
        rank: this rank's place in the pipeline.
        peers: connects the ranks; None on a pipeline of one rank.
        perform: executes one action: takes the action's input by the table and returns its output by the table.
            Either is None if the table has no message for it.
        timers: of the messages.
    """
    communicator = build_communicator(peers, schedule, rank)
    outgoing: Tensor | None = None
    for step, action in enumerate(schedule.stages[rank]):
        # This frame must not keep the last output alive: its memory is free as soon as it was sent.
        with measured(timers, "pipeline_communication"):
            incoming, outgoing = communicator.exchange(step, outgoing), None
        outgoing = perform(action, incoming)
    with measured(timers, "pipeline_communication"):
        communicator.finish(outgoing)


class TrainingStep:
    """One iteration of one rank, with the state between forwards, backwards and weight gradients."""

    def __init__(
        self,
        model: ParallelModel,
        micro_batches: Sequence[MicroBatch],
        loss_factors: Tensor,
        aux_loss_scale: float,
        randomness: StepRandomness,
        timers: StepTimers | None = None,
    ) -> None:
        self._timers = timers
        self._model = model
        self._micro_batches = micro_batches
        self._loss_factors = loss_factors
        self._aux_loss_scale = aux_loss_scale
        self._randomness = randomness
        self._queues: list[WeightGradientQueue] = []
        self._last_backwards: set[Action] = set()
        self._inputs: dict[tuple[int, int], Tensor | None] = {}
        # They keep the graph alive but not the output, whose memory is free as soon as it was sent.
        self._outputs: dict[tuple[int, int], SeededBackward] = {}
        self.loss_sum = torch.zeros(loss_factors.shape, dtype=torch.float64, device=_device(model))

    def run(self, schedule: PipelineSchedule) -> None:
        """Run this rank's row of the table. Collective: all ranks."""
        rank, chunks = self._model.mesh.pp_rank, self._model.chunks
        backwards = [action for action in schedule.stages[rank] if action.kind is not ActionKind.FORWARD]
        self._last_backwards = set({action.chunk: action for action in backwards}.values())
        with ExitStack() as stack:
            if any(action.kind is ActionKind.BACKWARD_WEIGHT for action in backwards):
                self._queues = [stack.enter_context(deferring(chunk)) for chunk in chunks]
            run_row(schedule, rank, _peers(self._model, self._micro_batches), self._time, self._timers)

    def _time(self, action: Action, incoming: Tensor | None) -> Tensor | None:
        is_forward = action.kind is ActionKind.FORWARD
        with measured(self._timers, "forward_compute" if is_forward else "backward_compute"):
            return self.perform(action, incoming)

    def perform(self, action: Action, incoming: Tensor | None) -> Tensor | None:
        """Execute one action of the table; see run_row."""
        if action in self._last_backwards:
            self._model.gradients.expect_last_backward(action.chunk)
        if action.kind is ActionKind.FORWARD:
            return self._forward(action, incoming)
        if action.kind is ActionKind.BACKWARD:
            return self._backward(action, incoming)
        if action.kind is ActionKind.BACKWARD_INPUT:
            with self._queues[action.chunk].recording(action.micro_batch):
                return self._backward(action, incoming)
        self._queues[action.chunk].run(action.micro_batch)
        return None

    def _forward(self, action: Action, hidden: Tensor | None) -> Tensor | None:
        micro_batch = self._micro_batches[action.micro_batch]
        if hidden is not None:
            hidden.requires_grad_()
        streams = self._randomness.micro_batch(micro_batch.index)
        chunk = self._model.chunks[action.chunk]
        output: Tensor = chunk(hidden, micro_batch, streams, aux_loss_scale=self._aux_loss_scale)
        turn = action.micro_batch, action.chunk
        self._inputs[turn] = hidden
        self._outputs[turn] = SeededBackward(output)
        if _is_last(self._model, action.chunk):
            self.loss_sum += output.detach()
            return None
        return output.detach()

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        turn = action.micro_batch, action.chunk
        if gradient is None:
            gradient = self._loss_factors
        self._outputs.pop(turn).run(gradient)
        hidden = self._inputs.pop(turn)
        return hidden.grad if hidden is not None else None


def _loss_factors(loss_scale: float, valid_tokens: int | Sequence[int], device: torch.device) -> Tensor:
    """The gradient of each sum of losses, float32: a scalar, or [terms].

    Filled on the device: a copy from the host's pageable memory would wait for all that the device has to do.
    """
    if isinstance(valid_tokens, int):
        return torch.full((), loss_scale / valid_tokens, dtype=torch.float32, device=device)
    return torch.stack([_loss_factors(loss_scale, tokens, device) for tokens in valid_tokens])


@torch.no_grad()
def forward_only(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Loss of this replica's micro-batches without dropout or gradients.

    Collective: all ranks of the replica; all ranks of the job, with equal numbers of micro-batches, if replicas divide
    experts or weights among themselves. Experts have no capacity limit.

    Returns:
        Sum of the token losses of this rank's part of the sequences, float64 scalar, 0 on all ranks outside the last
        stage. With several terms of the loss [terms] on the last stage, the sum of each.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=_device(model))
    parts = [model.axes.cp.shard_micro_batch(batch) for batch in micro_batches]
    for loss in _forward_stages(model, parts, compute_loss=True):
        loss_sum = loss_sum + loss
    return loss_sum


@torch.no_grad()
def forward_logits(
    model: ParallelModel,
    tokens: Tensor,
    encoder_tokens: Tensor | None = None,
    encoder_mask: Tensor | None = None,
) -> Tensor | None:
    """Logits of the whole vocabulary.

    Collective: all ranks of the replica; all ranks of the job if replicas divide experts or weights among themselves.

    Args:
        model: left unchanged.
        tokens: int64 [B, S], the same on all ranks. S need not be that of the training config, nor divisible over tp
            and cp; but rounded up to the next divisible length it must be within max_position_embeddings.
        encoder_tokens: int64 [B, E] of a model with encoder and decoder, whose ``tokens`` are the decoder's.
        encoder_mask: bool [B, E], False for padding of the encoder's tokens; None: no padding.

    Returns:
        [B, S, V] in the model's dtype on the last stage's ranks, None on the others.
    """
    length = tokens.shape[1]
    cp, tp = model.axes.cp, model.axes.tp
    # Padding at the end changes nothing: attention is causal, and experts drop no tokens outside of training.
    multiple = math.lcm(cp.divisor, cp.size * (tp.size if tp.sequence_parallel else 1))
    padded = nn.functional.pad(tokens, (0, -length % multiple))
    batch = MicroBatch(tokens=padded, labels=padded)
    if encoder_tokens is not None:
        mask = torch.ones_like(encoder_tokens, dtype=torch.bool) if encoder_mask is None else encoder_mask
        padding = (0, -encoder_tokens.shape[1] % multiple)
        source, mask = (nn.functional.pad(part, padding) for part in (encoder_tokens, mask))
        batch = replace(batch, encoder_tokens=source, encoder_mask=mask)
    part = cp.shard_micro_batch(batch)
    outputs = _forward_stages(model, [part], compute_loss=False)  # of [S/c, B, V/t]
    return cp.gather(_gather_vocabulary(model, outputs[0]))[:length].transpose(0, 1) if outputs else None


@torch.inference_mode()
def forward_next(model: ParallelModel, tokens: Tensor, cache: KeyValueCache) -> Tensor | None:
    """Logits of the token after each row, of the whole vocabulary.

    Collective: all ranks of the replica; all ranks of the job if replicas divide experts among themselves.

    Args:
        model: without sequence and context parallelism; left unchanged.
        tokens: int64 [B, S], the same on all ranks: the prompts with padding behind them, and afterwards [B, 1].
        cache: of this rank; takes the tokens.

    Returns:
        [B, V] in the model's dtype on the last stage's ranks, None on the others.
    """
    outputs = _forward_stages(model, [MicroBatch(tokens, tokens)], compute_loss=False, cache=cache)
    cache.advance()
    return _gather_vocabulary(model, outputs[0])[0] if outputs else None


def _gather_vocabulary(model: ParallelModel, local: Tensor) -> Tensor:
    """Logits [S, B, V] from every tp rank's columns.

    Ranks with vocabulary padding hold fewer columns, or none.
    """
    if model.groups.tp is None:
        return local
    table = next(layout for layout in model.layouts.values() if layout.valid_rows is not None)
    width = table.global_shape[0] // model.mesh.tp
    local = nn.functional.pad(local, (0, width - local.shape[-1]))
    parts = [torch.empty_like(local) for _ in range(model.mesh.tp)]
    dist.all_gather(parts, local, group=model.groups.tp)
    return torch.cat(parts, dim=-1)[..., : table.valid_rows]


def _forward_stages(
    model: ParallelModel,
    micro_batches: Sequence[MicroBatch],
    *,
    compute_loss: bool,
    cache: KeyValueCache | None = None,
) -> list[Tensor]:
    """Outputs of the last virtual stage, one per micro-batch.

    An empty list on ranks without this stage.
    """
    outputs: list[Tensor] = []

    def perform(action: Action, hidden: Tensor | None) -> Tensor | None:
        chunk = model.chunks[action.chunk]
        output: Tensor = chunk(hidden, micro_batches[action.micro_batch], None, compute_loss, cache=cache)
        if not _is_last(model, action.chunk):
            return output
        outputs.append(output)
        return None

    schedule = all_forward(model.placement, len(micro_batches))
    run_row(schedule, model.mesh.pp_rank, _peers(model, micro_batches), perform)
    return outputs


def _is_last(model: ParallelModel, chunk: int) -> bool:
    """True if a chunk of this rank ends with LM head and loss."""
    return model.placement.virtual_stage(model.mesh.pp_rank, chunk) == model.placement.num_virtual_stages - 1


def _peers(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> PipelinePeers | None:
    groups = model.groups
    if groups.pp is None or groups.pp_up is None:
        return None
    return PipelinePeers(
        group=groups.pp,
        group_up=groups.pp_up,
        ranks=tuple(dist.get_process_group_ranks(groups.pp)),
        # Every rank of a replica has all of its micro-batches, and so knows the shapes of its incoming messages.
        shapes=[model.chunks[0].hidden_shape(batch.tokens) for batch in micro_batches],
        dtype=model.chunks[0].dtype,
        device=micro_batches[0].tokens.device,
    )


def _device(model: ParallelModel) -> torch.device:
    return next(iter(model.parameters.values())).device
