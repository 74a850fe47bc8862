"""Known faults of trainers as context managers, each of which injects one.

The ranks enter a fault before they build the model. A fault gives wrong numbers without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch

from tests.trainer.parity import expert_mutations, layout_parity
from tests.trainer.parity.parity_case import Case
from trainer.data.samples.further_tokens import with_further_tokens
from trainer.data_parallel import fully_sharded, gradient_buckets, shared_gradients
from trainer.data_parallel.sharded_buckets import ShardedBuckets
from trainer.distributed.mesh import ProcessGroups
from trainer.distributed.random_streams import MicroBatchRandomness
from trainer.model import dropout, head
from trainer.model.attention import latent_attention
from trainer.model.context import ParallelAxes
from trainer.model.context_parallel.axis import ContextParallel
from trainer.model.decoder import GPTStage
from trainer.model.rotary import RotaryTable
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel import collectives, linear
from trainer.optimizer import clipping, masters, mixed_precision
from trainer.pipeline.executor import forward_backward
from trainer.pipeline.weight_gradients import WeightGradientQueue


def _changed_options(change: Callable[..., dict[str, Any]]) -> AbstractContextManager[object]:
    """Call forward_backward with wrong arguments."""

    def changed(model: Any, micro_batches: Any, **options: Any) -> Any:
        return forward_backward(model, **change(model, {"micro_batches": micro_batches, **options}))

    return mock.patch.object(layout_parity, "forward_backward", changed)


def row_parallel_sum_dropped() -> AbstractContextManager[object]:
    """The partial outputs of row-parallel layers are not summed over tp."""
    return mock.patch.object(linear, "reduce_partial_sums", lambda partial, *_: partial)


def sequence_parallel_sum_dropped() -> AbstractContextManager[object]:
    """Partial outputs are divided along the sequence, but not summed over tp."""
    return mock.patch.object(linear, "reduce_partial_sums", lambda partial, tp, *_: tp.sequence_shard(partial).clone())


def column_parallel_gradient_sum_dropped() -> AbstractContextManager[object]:
    """The input gradients of column-parallel layers are not summed over tp."""

    def unsummed(partial: torch.Tensor, tp: Any) -> collectives.PendingCollective:
        return collectives.PendingCollective(tp.sequence_shard(partial), partial, None)

    return mock.patch.object(linear, "start_sum", unsummed)


def sequence_parallel_norm_sum_dropped() -> AbstractContextManager[object]:
    """Gradients of norms and biases are not summed over tp under sequence parallelism."""
    return mock.patch.object(ParameterBuilder, "_is_partial", lambda *_: False)


def query_key_norm_sum_dropped() -> AbstractContextManager[object]:
    """Each rank keeps the gradient that its own heads give to the norms of queries and keys."""
    is_partial = ParameterBuilder._is_partial
    return mock.patch.object(
        ParameterBuilder, "_is_partial", lambda self, _, on_shard: is_partial(self, False, on_shard)
    )


def latent_gradient_sum_dropped() -> AbstractContextManager[object]:
    """Each rank trains the low-rank products by the gradient of its own heads."""
    return mock.patch.object(latent_attention, "enter_parallel_region", lambda latents, _: latents)


@contextmanager
def _without_group(axis: str) -> Iterator[None]:
    complete = shared_gradients.sum_shared_gradients

    def incomplete(parameter_shards: Any, layouts: Any, mesh: Any, groups: ProcessGroups) -> None:
        complete(parameter_shards, layouts, mesh, replace(groups, **{axis: None}))

    with (
        mock.patch.object(gradient_buckets, "sum_shared_gradients", incomplete),
        mock.patch.object(fully_sharded, "sum_shared_gradients", incomplete),
    ):
        yield


def tied_embedding_sum_dropped() -> AbstractContextManager[object]:
    """The gradients of tied embedding and LM head are not summed."""
    return _without_group("embedding")


def further_tokens_of_the_own_part() -> AbstractContextManager[object]:
    """Each context-parallel rank shifts its own part of the sequence for multi-token prediction."""
    shard = ContextParallel.shard_micro_batch

    def shifted_later(self: ContextParallel, whole: Any) -> Any:
        part = shard(self, replace(whole, further=()))
        return replace(part, further=with_further_tokens(replace(part, documents=None), len(whole.further)).further)

    return mock.patch.object(ContextParallel, "shard_micro_batch", shifted_later)


def key_value_sum_dropped() -> AbstractContextManager[object]:
    """Gradients of shared key and value heads are not summed over their ranks."""
    return _without_group("kv")


def divided_by_micro_batches_again() -> AbstractContextManager[object]:
    """The gradient is divided by the number of micro-batches a second time."""
    return _changed_options(lambda _, o: {**o, "loss_scale": o["loss_scale"] / len(o["micro_batches"])})


def not_divided_at_all() -> AbstractContextManager[object]:
    """The gradient is that of the sum of the losses."""
    return _changed_options(lambda _, o: {**o, "valid_tokens": 1})


def divided_by_own_tokens() -> AbstractContextManager[object]:
    """Every replica averages over its own tokens."""

    def change(model: Any, options: dict[str, Any]) -> dict[str, Any]:
        own = sum(int(batch.loss_mask.sum()) for batch in options["micro_batches"])
        return {**options, "valid_tokens": max(1, own) * model.mesh.dp}

    return _changed_options(change)


def context_parallel_scale_applied() -> AbstractContextManager[object]:
    """The loss is averaged over cp ranks, although each has only its own tokens."""
    return _changed_options(lambda model, o: {**o, "valid_tokens": o["valid_tokens"] * model.mesh.cp})


def micro_batches_swapped() -> AbstractContextManager[object]:
    """Later pipeline ranks take micro-batches in reverse order."""

    def change(model: Any, options: dict[str, Any]) -> dict[str, Any]:
        batches = list(options["micro_batches"])
        return {**options, "micro_batches": batches if model.mesh.is_first_stage else batches[::-1]}

    return _changed_options(change)


def dropout_by_local_number() -> AbstractContextManager[object]:
    """Replicas count their micro-batches from 0, so that all draw the same dropout masks."""

    def change(_: Any, options: dict[str, Any]) -> dict[str, Any]:
        batches = [replace(batch, index=number) for number, batch in enumerate(options["micro_batches"])]
        return {**options, "micro_batches": batches}

    return _changed_options(change)


def dropout_mask_of_the_first_shard() -> AbstractContextManager[object]:
    """Every part of a divided sequence takes the beginning of the dropout mask."""

    def beginning(
        hidden: torch.Tensor,
        probability: float,
        randomness: MicroBatchRandomness | None,
        site: Any,
        _: Any,
        kernels: Any,
        layer: int = 0,
        **more: torch.Tensor | None,
    ) -> torch.Tensor:
        # As if each rank had the whole sequence.
        return dropout.hidden_dropout(hidden, probability, randomness, site, ParallelAxes(), kernels, layer, **more)

    from trainer.model import block

    return mock.patch.object(block, "hidden_dropout", beginning)


def clipped_per_stage() -> AbstractContextManager[object]:
    """Every rank clips by the norm of its own parameters."""
    # Only this module's name for torch.distributed: other modules must still sum.
    return mock.patch.object(clipping, "dist", SimpleNamespace(all_reduce=lambda *_, **__: None))


def gradient_not_clipped() -> AbstractContextManager[object]:
    """The gradient norm is computed but not used for clipping."""
    return mock.patch.object(mixed_precision, "clip_divisor", lambda *_: 1.0)


def steps_not_counted() -> AbstractContextManager[object]:
    """Adam corrects the bias of every step as that of the first."""
    constants = masters.AdamWConstants
    return mock.patch.object(masters, "AdamWConstants", lambda *given: replace(constants(*given), step=1))


def positions_of_the_shard() -> AbstractContextManager[object]:
    """Rotary angles count from the beginning of each context-parallel part."""

    def local(_: GPTStage, table: RotaryTable | None, tokens: torch.Tensor, __: object) -> RotaryTable | None:
        return None if table is None else table.first(len(tokens))

    return mock.patch.object(GPTStage, "_rotary_of", local)


@contextmanager
def weights_not_gathered() -> Iterator[None]:
    """The other ranks' parts of the weights stay as they were before the step."""
    gather = ShardedBuckets.weights_changed
    begun: WeakSet[ShardedBuckets] = WeakSet()

    def only_once(self: ShardedBuckets) -> None:
        # Weights that are written before training must reach all ranks.
        if self not in begun:
            begun.add(self)
            gather(self)

    with mock.patch.object(ShardedBuckets, "weights_changed", only_once):
        yield


def softcap_dropped_in_the_loss() -> AbstractContextManager[object]:
    """Only the logits of evaluation are capped, and the fused cross entropy reads them as they are."""
    loss = head.vocab_parallel_cross_entropy

    def uncapped(*given: Any) -> torch.Tensor:
        *others, terms = given
        return loss(*others, replace(terms, softcap=None))

    return mock.patch.object(head, "vocab_parallel_cross_entropy", uncapped)


@contextmanager
def gathered_weights_kept() -> Iterator[None]:
    """The next forward uses the weights gathered before the step."""

    def keep(_: Any, chunk: Any, *, is_last: bool) -> None:
        chunk.set_is_last_backward(is_last)
        chunk.set_reshard_after_backward(False)

    store = fully_sharded.FullyShardedStore
    with mock.patch.object(store, "_set_last", keep), mock.patch.object(store, "weights_changed", lambda _: None):
        yield


def shards_not_summed() -> AbstractContextManager[object]:
    """Each rank updates its shard by the gradient of its own samples."""
    return mock.patch.object(ShardedBuckets, "_start_reduction", lambda *_: mock.Mock())


def deferred_weight_gradients_forgotten() -> AbstractContextManager[object]:
    """The deferred weight gradients of the first micro-batch are never computed."""
    run = WeightGradientQueue.run

    def forgetful(self: WeightGradientQueue, micro_batch: int) -> None:
        if micro_batch:
            run(self, micro_batch)

    return mock.patch.object(WeightGradientQueue, "run", forgetful)


@contextmanager
def other_masks_when_recomputed() -> Iterator[None]:
    """Dropout continues its random stream in recompute, so that the recomputed values differ."""
    drawn: dict[tuple[Any, ...], int] = {}
    seed = MicroBatchRandomness.dropout_seed

    def draw_on(self: MicroBatchRandomness, site: Any, layer: int = 0, part: int = 0) -> int:
        address = (self, site, layer, part)
        drawn[address] = drawn.get(address, -1) + 1
        return seed(self, site, layer, part + 1000 * drawn[address])

    with mock.patch.object(MicroBatchRandomness, "dropout_seed", draw_on):
        yield


def contiguous_parts_instead_of_balanced() -> AbstractContextManager[object]:
    """Sequences are cut into contiguous parts, but ring attention assumes balanced pairs of chunks."""

    def contiguous(self: ContextParallel, whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.chunk(self.size, dim)[self.rank]

    return mock.patch.object(ContextParallel, "shard", contiguous)


@dataclass(frozen=True)
class Fault:
    """A mutation, and the cases that must catch it."""

    name: str
    enter: Callable[[], AbstractContextManager[object]]
    meets: Callable[[Case], bool]

    def __str__(self) -> str:
        return self.name


def _fault(
    enter: Callable[[], AbstractContextManager[object]], meets: Callable[[Case], bool], where: str = ""
) -> Fault:
    return Fault(f"{enter.__name__}{where}", enter, meets)


def _is_tied(case: Case) -> bool:
    return case.model in ("gpt2", "qwen", "gemma2", "opt")


def _is_tied_over_ranks(case: Case) -> bool:
    return _is_tied(case) and case.pp > 1 and case.schedule != "zb-v"


def _has_experts(case: Case) -> bool:
    return case.model in ("mixtral", "capacity", "sigmoid")


FAULTS = (
    _fault(row_parallel_sum_dropped, lambda c: c.tp > 1 and not c.sp),
    _fault(sequence_parallel_sum_dropped, lambda c: c.sp),
    _fault(column_parallel_gradient_sum_dropped, lambda c: c.tp > 1),
    _fault(sequence_parallel_norm_sum_dropped, lambda c: c.sp),
    _fault(query_key_norm_sum_dropped, lambda c: c.model == "qwen3" and c.tp > 1),
    _fault(latent_gradient_sum_dropped, lambda c: c.model == "deepseek" and c.tp > 1 and not c.sp),
    _fault(tied_embedding_sum_dropped, lambda c: _is_tied_over_ranks(c) and not c.zero),
    _fault(tied_embedding_sum_dropped, lambda c: _is_tied_over_ranks(c) and c.zero == 1, " with ZeRO-1"),
    _fault(tied_embedding_sum_dropped, lambda c: _is_tied_over_ranks(c) and c.zero > 1, " with ZeRO-2 or 3"),
    _fault(
        tied_embedding_sum_dropped,
        lambda c: c.model == "deepseek" and c.pp > 1 and c.schedule != "zb-v",
        " of multi-token prediction",
    ),
    _fault(further_tokens_of_the_own_part, lambda c: c.model == "deepseek" and c.cp > 1),
    _fault(key_value_sum_dropped, lambda c: c.model == "qwen" and c.tp == 4 and not c.zero),
    _fault(key_value_sum_dropped, lambda c: c.model == "capacity" and c.tp > 1 and c.zero == 1, " with ZeRO-1"),
    _fault(key_value_sum_dropped, lambda c: c.model == "capacity" and c.tp > 1 and c.zero > 1, " with ZeRO-2 or 3"),
    _fault(divided_by_micro_batches_again, lambda c: c.pp > 1),
    _fault(not_divided_at_all, lambda c: c.dp > 1),
    _fault(divided_by_own_tokens, lambda c: c.dp > 1),
    _fault(context_parallel_scale_applied, lambda c: c.cp > 1),
    # With zb-v the first rank has the last stage too.
    _fault(micro_batches_swapped, lambda c: c.pp > 1 and c.schedule != "zb-v"),
    _fault(dropout_by_local_number, lambda c: c.dp > 1 and c.model == "gpt2"),
    _fault(dropout_mask_of_the_first_shard, lambda c: c.sp and c.model == "gpt2"),
    _fault(clipped_per_stage, lambda c: c.pp > 1 and not _is_tied(c)),
    # Of a model whose gradient is longer than the limit.
    _fault(gradient_not_clipped, lambda c: c.dp > 1 and c.model == "llama"),
    _fault(steps_not_counted, lambda c: c.zero == 1 and c.steps == "adam"),
    _fault(positions_of_the_shard, lambda c: c.cp > 1 and c.model == "llama"),
    _fault(contiguous_parts_instead_of_balanced, lambda c: c.cp > 1 and c.cp_comm == "p2p"),
    _fault(softcap_dropped_in_the_loss, lambda c: c.model == "gemma2" and c.tp > 1),
    _fault(weights_not_gathered, lambda c: c.zero == 1),
    _fault(shards_not_summed, lambda c: c.zero == 1),
    _fault(gathered_weights_kept, lambda c: c.zero == 2),
    _fault(deferred_weight_gradients_forgotten, lambda c: c.schedule in ("zb-h1", "zb-v")),
    _fault(other_masks_when_recomputed, lambda c: c.recompute in ("uniform", "block") and c.model == "gpt2"),
    _fault(expert_mutations.auxiliary_loss_of_every_tp_rank, lambda c: _has_experts(c) and c.tp == 2),
    _fault(expert_mutations.auxiliary_loss_of_the_own_part, lambda c: _has_experts(c) and c.cp > 1),
    _fault(expert_mutations.auxiliary_loss_averaged_over_the_own_part, lambda c: _has_experts(c) and c.cp > 1),
    _fault(expert_mutations.capacity_of_the_own_part, lambda c: c.model == "capacity" and c.cp > 1),
    _fault(expert_mutations.token_gradients_not_summed, lambda c: _has_experts(c) and c.tp > 1 and not c.sp),
    _fault(expert_mutations.tokens_back_in_the_order_of_arrival, lambda c: _has_experts(c) and c.ep > 1),
    _fault(expert_mutations.experts_summed_over_all_data_ranks, lambda c: _has_experts(c) and c.ep > 1 and not c.zero),
    _fault(expert_mutations.tokens_of_the_first_tp_rank, lambda c: c.etp == 1 and c.sp),
    _fault(expert_mutations.copies_on_other_tp_ranks_not_summed, lambda c: c.etp == 1 and c.ep == 1 and not c.zero),
    _fault(expert_mutations.expert_sum_dropped, lambda c: _has_experts(c) and c.ep == 1 and c.dp > 1 and not c.zero),
)
