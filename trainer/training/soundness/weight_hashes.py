"""Comparison of the weights that replicas must hold with equal bits.

A fault of a machine may change a weight of one replica; training then goes on with different models, which no loss
shows. Each rank hashes its weights, and the ranks that hold copies of them compare the hashes.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.distributed.collectives import first_text
from trainer.process.failure import PeerFailedError
from trainer.training.soundness.errors import SoundnessError

if TYPE_CHECKING:
    from trainer.config.sections.training import TrainingConfig
    from trainer.parallel_model import ParallelModel

_CHUNK = 1 << 20
"""Elements that are hashed at a time: a temporary tensor has 8 MiB."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The increment and the first multiplier of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers.
_STEP, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)
_MOST_NAMED = 4
Copies = Sequence[Sequence[int]]
"""Of each rank with copies of the same weights: the hash of each weight."""


class ReplicaError(SoundnessError):
    """Replicas hold different bits of the same weights: a machine, a driver or a message is at fault."""


def compare_replicas(model: ParallelModel, training: TrainingConfig, iteration: int, device: torch.device) -> None:
    """Compare the hashes of all replicated weights, if ``iteration`` is one of those that do so.

    Collective: all ranks, after the optimizer step. Experts are compared over the ranks that hold the same experts.

    Args:
        model: its parameters are whole tensors, so that its ZeRO stage is below 2.
        training: check_weight_hash_across_dp_replicas_interval.
        iteration: number of completed iterations.
        device: of the model.

    Raises:
        ReplicaError: on the first rank that differs, weights differ.
        PeerFailedError: on all other ranks, with the same sentence.
    """
    interval = training.check_weight_hash_across_dp_replicas_interval
    if interval is None or iteration % interval or max(model.mesh.data_size, model.mesh.expert_dp) == 1:
        return
    # With ZeRO-1 they may still be on their way from other ranks.
    model.gradients.wait_for_weights()
    dense = _difference(model, device, is_expert=False)
    experts = _difference(model, device, is_expert=True)
    difference = first_text(dense or experts, device)
    if not difference:
        return
    rank, words = difference.split(":", 1)
    sentence = (
        f"after iteration {iteration} {words}; checkpoints after iteration {iteration - interval} may hold wrong "
        "weights, so go on from an earlier one, without the machine if it differs again"
    )
    raise ReplicaError(sentence) if model.mesh.rank == int(rank) else PeerFailedError(sentence)


def hash_bits(weight: Tensor) -> Tensor:
    """Hash of all bits of a tensor: int64, without dims, on its device.

    The sum of all elements' bits, each times an odd number that belongs to its position, modulo 2^64. A change of one
    element always changes the sum, on every device in the same way.
    """
    bits = weight.detach().reshape(-1).view(_BITS[weight.element_size()])
    factors = torch.arange(1, 1 + min(_CHUNK, bits.numel()), device=weight.device).mul_(_STEP)
    factors.bitwise_xor_(factors >> 30).mul_(_MIX)
    factors.bitwise_xor_(factors >> 27).bitwise_or_(1)
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for part in torch.split(bits, _CHUNK):
        # The odd step makes the factors of each chunk other ones.
        total.mul_(_STEP).add_((part * factors[: part.numel()]).sum())
    return total


def places_that_differ(copies: Copies) -> list[int]:
    """Places whose hashes are not those of more than half of the copies; all places if no such majority exists."""
    counted = Counter(map(tuple, copies))
    ((most, count),) = counted.most_common(1)
    if len(counted) > 1 and 2 * count <= len(copies):
        return list(range(len(copies)))
    return [place for place, hashes in enumerate(copies) if tuple(hashes) != most]


def _difference(model: ParallelModel, device: torch.device, *, is_expert: bool) -> str:
    """First rank that differs and a clause about all, as ``RANK:CLAUSE``; empty if all copies are equal.

    Collective: the ranks with copies of the dense weights, or of the same experts. One message of 8 bytes per weight.
    """
    mesh, group = model.mesh, model.groups.copies(is_expert)
    weights = {name: each for name, each in model.parameters.items() if model.layouts[name].is_expert == is_expert}
    if group is None or not weights:
        return ""
    own = torch.stack([hash_bits(weight) for weight in weights.values()])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    copies: list[list[int]] = torch.stack(gathered).tolist()
    places = places_that_differ(copies)
    if not places:
        return ""
    hosts = _hosts(group, device)
    ranks = mesh.expert_dp_ranks if is_expert else mesh.dp_cp_ranks
    named = [f"{mesh.describe(ranks[place])} on {hosts[place]}" for place in places[:_MOST_NAMED]]
    named += [f"{len(places) - _MOST_NAMED} more"] if len(places) > _MOST_NAMED else []
    others = len(copies) - len(places)
    whose = f"those of the other {others} replicas" if others else "each other"
    first = next(name for name, hashes in zip(weights, zip(*copies, strict=True), strict=True) if len(set(hashes)) > 1)
    return f"{ranks[places[0]]}:the weights of {' and '.join(named)} differ from {whose}, first in {first}"


def _hosts(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Name of each rank's machine, cut to 64 bytes. Collective: all ranks of ``group``."""
    own = torch.tensor(list(socket.gethostname().encode()[:64].ljust(64)), dtype=torch.uint8, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [bytes(name.tolist()).decode(errors="replace").strip() for name in found]
