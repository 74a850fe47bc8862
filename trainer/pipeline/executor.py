"""Runs a pipeline schedule table on one rank: forward and backward of an iteration, evaluation, logits.

Legend: S sequence, B micro-batch, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data.batches import MicroBatch
from trainer.pipeline.communication import Wire, build_messenger
from trainer.pipeline.schedule import ActionKind, PipelineSchedule, all_forward, exchanges, one_f_one_b

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge

    from trainer.random_streams import StepRandomness
    from trainer.train_state import ParallelModel


def forward_backward(
    model: ParallelModel,
    micro_batches: Sequence[MicroBatch],
    *,
    valid_tokens: int,
    loss_scale: float,
    randomness: StepRandomness,
) -> Tensor:
    """Forward and backward of this replica's part of one global batch (collective: all ranks).

    The gradient is that of ``loss_scale * (sum of token losses over the global batch) / valid_tokens``, and of the mean
    over the micro-batches of auxiliary losses where layers add any. These divisions are the only ones: micro-batches
    and replicas are summed, so that every token counts the same in every layout.

    Args:
        model: afterwards its main gradients are final, still multiplied by ``loss_scale``.
        micro_batches: this replica's, in order, with whole sequences; the same on each of its ranks.
        valid_tokens: tokens under the loss in the whole global batch, all replicas together.
        loss_scale: factor that keeps fp16 gradients from vanishing; 1 otherwise.
        randomness: dropout streams of this iteration.

    Returns:
        Sum of the token losses of this rank's part of its micro-batches, float64 scalar, neither averaged nor scaled;
        0 on all but the last stage's ranks.
    """
    model.gradients.begin(len(micro_batches))
    aux_loss_scale = loss_scale / (len(micro_batches) * model.mesh.dp)
    micro_batches = [model.axes.cp.shard_micro_batch(batch) for batch in micro_batches]
    training = _Training(model, micro_batches, loss_scale / valid_tokens, aux_loss_scale, randomness)
    training.run(one_f_one_b(model.mesh.pp, len(micro_batches)))
    model.gradients.finish()
    return training.loss_sum


class _Training:
    """State of one iteration: what the forwards leave for the backwards."""

    def __init__(
        self,
        model: ParallelModel,
        micro_batches: Sequence[MicroBatch],
        loss_factor: float,
        aux_loss_scale: float,
        randomness: StepRandomness,
    ) -> None:
        self._model = model
        self._micro_batches = micro_batches
        self._loss_factor = loss_factor
        self._aux_loss_scale = aux_loss_scale
        self._randomness = randomness
        self._backwards_left = len(micro_batches)
        self._inputs: dict[int, Tensor | None] = {}
        # The edge keeps the graph alive but not the output, which is free as soon as it was sent.
        self._outputs: dict[int, GradientEdge] = {}
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=_device(model))

    def run(self, schedule: PipelineSchedule) -> None:
        """Run this stage's row of the table."""
        row = exchanges(schedule, self._model.mesh.pp_rank)
        messenger = build_messenger(_wire(self._model, self._micro_batches[0].tokens), row)
        outgoing: Tensor | None = None
        for step, exchange in enumerate(row):
            incoming = messenger.exchange(step, outgoing)
            run = self._forward if exchange.action.kind is ActionKind.FORWARD else self._backward
            outgoing = run(exchange.action.micro_batch, incoming)
        messenger.finish(outgoing)

    def _forward(self, number: int, hidden: Tensor | None) -> Tensor | None:
        micro_batch = self._micro_batches[number]
        if hidden is not None:
            hidden.requires_grad_()
        streams = self._randomness.micro_batch(micro_batch.index)
        output: Tensor = self._model.chunks[0](hidden, micro_batch, streams, aux_loss_scale=self._aux_loss_scale)
        self._inputs[number] = hidden
        self._outputs[number] = torch.autograd.graph.get_gradient_edge(output)
        if self._model.mesh.computes_loss:
            self.loss_sum += output.detach()
            return None
        return output.detach()

    def _backward(self, number: int, gradient: Tensor | None) -> Tensor | None:
        self._backwards_left -= 1
        if self._backwards_left == 0:
            self._model.gradients.expect_last_backward(0)
        if gradient is None:
            gradient = torch.full((), self._loss_factor, dtype=torch.float32, device=self.loss_sum.device)
        torch.autograd.backward(self._outputs.pop(number), gradient)
        hidden = self._inputs.pop(number)
        return hidden.grad if hidden is not None else None


@torch.no_grad()
def forward_only(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, int]:
    """Loss of this replica's micro-batches without dropout or gradients (collective: all ranks of the replica).

    Returns:
        Sum of the token losses of this rank's part of the sequences, float64 scalar, 0 on all but the last stage's
        ranks; and the number of valid tokens of the whole sequences, the same on all ranks.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=_device(model))
    parts = [model.axes.cp.shard_micro_batch(batch) for batch in micro_batches]
    for loss in _forward_stages(model, parts, compute_loss=True):
        loss_sum += loss
    return loss_sum, sum(
        batch.labels.numel() if batch.loss_mask is None else int(batch.loss_mask.sum()) for batch in micro_batches
    )


@torch.no_grad()
def forward_logits(model: ParallelModel, tokens: Tensor) -> Tensor | None:
    """Logits of the whole vocabulary (collective: all ranks of the replica).

    Args:
        model: left unchanged.
        tokens: int64 [B, S], the same on all ranks; S need not be that of the training config.

    Returns:
        [B, S, V] in the model's dtype on the last stage's ranks, None on the others.
    """
    length = tokens.shape[1]
    # Sequence parallelism divides the sequence over tp. What is appended here comes after everything that counts.
    padded = nn.functional.pad(tokens, (0, -length % model.mesh.tp))
    micro_batch = MicroBatch(tokens=padded, labels=padded)
    outputs = _forward_stages(model, [micro_batch], compute_loss=False)  # of [S, B, V/t]
    return _gather_vocabulary(model, outputs[0])[:length].transpose(0, 1) if outputs else None


def _gather_vocabulary(model: ParallelModel, local: Tensor) -> Tensor:
    """[S, B, V] from every tp rank's columns, of which those with vocabulary padding hold fewer, or none."""
    if model.groups.tp is None:
        return local
    table = next(layout for layout in model.layouts.values() if layout.valid_rows is not None)
    width = table.global_shape[0] // model.mesh.tp
    local = nn.functional.pad(local, (0, width - local.shape[-1]))
    parts = [torch.empty_like(local) for _ in range(model.mesh.tp)]
    dist.all_gather(parts, local, group=model.groups.tp)
    return torch.cat(parts, dim=-1)[..., : table.valid_rows]


def _forward_stages(model: ParallelModel, micro_batches: Sequence[MicroBatch], *, compute_loss: bool) -> list[Tensor]:
    """Outputs of the last stage, one per micro-batch; nothing on the other stages."""
    outputs: list[Tensor] = []
    row = exchanges(all_forward(model.mesh.pp, len(micro_batches)), model.mesh.pp_rank)
    messenger = build_messenger(_wire(model, micro_batches[0].tokens), row)
    outgoing: Tensor | None = None
    for step, micro_batch in enumerate(micro_batches):
        hidden = messenger.exchange(step, outgoing)
        outgoing = model.chunks[0](hidden, micro_batch, None, compute_loss)
        if model.mesh.computes_loss:
            outputs.append(outgoing)
    messenger.finish(outgoing)
    return outputs


def _wire(model: ParallelModel, tokens: Tensor) -> Wire | None:
    if model.groups.pp is None:
        return None
    return Wire(
        group=model.groups.pp,
        ranks=tuple(dist.get_process_group_ranks(model.groups.pp)),
        shape=model.chunks[0].hidden_shape(*tokens.shape),
        dtype=model.chunks[0].dtype,
        device=tokens.device,
    )


def _device(model: ParallelModel) -> torch.device:
    return next(iter(model.parameters.values())).device
