"""ZeRO stages 2 and 3 by torch's fully_shard.

Gradients, masters and moments are sharded, with stage 3 also weights.

Every layer is a unit: one all-gather brings its weights before they are used, and one reduce-scatter sums its
gradients as soon as backward has passed the layer. Sources: Rajbhandari et al. 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054), sections 5.2 and 5.3; Zhao et al. 2023,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (arXiv:2304.11277).

fully_shard cuts a parameter along dim 0 into one part per rank, with equal numbers of rows except for the last ones,
which may be smaller or empty. Such a part of a row-major tensor is contiguous, as a ParameterShard must be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.data_parallel.parameter_shards import ParameterShard
from trainer.data_parallel.shared_gradients import sum_shared_gradients

if TYPE_CHECKING:
    from trainer.config.sections.parallel import ParallelConfig
    from trainer.distributed.mesh import ParallelMesh, ProcessGroups
    from trainer.model.sharding import ParameterLayout


class FullyShardedStore:
    """Float32 weights and main gradients of this rank's shards.

    Implements trainer.data_parallel.parameter_shards.GradientStore. Between iterations the modules' parameters are
    these shards; inside a unit's forward and backward they are whole and in the model's dtype. Stage
    2 gathers the weights for the first forward of an iteration and keeps them until the last backward; stage 3 gathers
    them for every forward and every backward of a unit. Weights gathered by an evaluation may stay until the next
    backward.
    """

    is_sharded = True

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        layouts: dict[str, ParameterLayout],
        mesh: ParallelMesh,
        groups: ProcessGroups,
        parallel: ParallelConfig,
        *,
        device: torch.device,
    ) -> None:
        """Remember the parameters; ``connect`` shards them.

        Args:
            parameters: this rank's, by global name; ``connect`` replaces them by the sharded ones.
            layouts: names the parameters of experts, and those that are also summed over tp or between the stages.
            mesh: this rank's place.
            groups: groups of the axes to sum over; None for an axis of size 1.
            parallel: the ZeRO stage.
            device: of the shards.
        """
        self._parameters = parameters
        self._layouts = layouts
        self._mesh = mesh
        self._groups = groups
        self._device = device
        self._keeps_weights = parallel.zero_stage == 2
        self._timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        self._chunks: list[FSDPModule] = []
        self._units: list[FSDPModule] = []
        self._gradients: list[Tensor] = []
        self.parameter_shards: list[ParameterShard] = []

    def connect(self, chunks: Sequence[nn.Module]) -> None:
        """Shard the parameters of ``chunks``; once, before any forward.

        Parameters on torch's meta device get memory for this rank's shards only, filled with zeros.

        Collective: all ranks of the job.
        """
        places = self._places(chunks)
        dtype = next(iter(self._parameters.values())).dtype
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for name, parameter in self._parameters.items():
            parameter.data = _as_rows(parameter.detach(), self._layouts[name]).float()
        groups = (self._groups.copies(False), self._groups.copies(True) or self._group_of_one())
        sharding = _Sharding(self._layouts, groups, self._device, policy, reshards=not self._keeps_weights)
        for chunk in chunks:
            names = {id(parameter): name for name, parameter in self._parameters.items()}
            self._chunks.append(sharding.shard_chunk(chunk, names, is_last_used=self._mesh.pp == 1))
            # As Module.to_empty does, so that the units take the new tensors over; but buffers keep their values.
            chunk._apply(self._with_memory)  # type: ignore[no-untyped-call]
        for name, (module, attribute) in places.items():
            self._parameters[name] = getattr(module, attribute)
            self._add_shard(name, self._parameters[name])
        self._units = [module for chunk in chunks for module in chunk.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            # A plain sum: neither an average nor a scaled sum, which gloo does not support.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def _with_memory(self, tensor: Tensor) -> Tensor:
        """A shard on the meta device in memory, as zeros; other tensors as they are."""
        if not isinstance(tensor, DTensor) or not tensor._local_tensor.is_meta:
            return tensor
        return _like(tensor, torch.zeros_like(tensor._local_tensor, device=self._device))

    def _group_of_one(self) -> dist.ProcessGroup | None:
        """This rank's own group, for experts that no other rank holds.

        Collective if there are such experts, also for ranks whose stage has none of them: NCCL splits the job's
        communicator, which takes all of its ranks (ncclCommSplit), into one per rank.
        """
        if self._mesh.copies(True) > 1:
            return None
        group: dist.ProcessGroup = dist.new_group(
            [dist.get_rank()], timeout=self._timeout, use_local_synchronization=True
        )
        return group

    def _places(self, chunks: Sequence[nn.Module]) -> dict[str, tuple[nn.Module, str]]:
        """Module and attribute that hold each parameter."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        places: dict[str, tuple[nn.Module, str]] = {}
        owners: dict[str, int] = {}
        for number, chunk in enumerate(chunks):
            for module in chunk.modules():
                for attribute, parameter in module.named_parameters(recurse=False):
                    name = names[id(parameter)]
                    places[name] = (module, attribute)
                    assert owners.setdefault(name, number) == number, f"{name} is in two chunks of one rank"
        return places

    def _add_shard(self, name: str, parameter: nn.Parameter) -> None:
        assert isinstance(parameter, DTensor)
        # DTensor ops are avoided: DTensor's cache keeps the process groups of every mesh that it has seen.
        weight = parameter._local_tensor
        gradient = torch.zeros_like(weight)
        # Backward adds to an existing gradient, so that this buffer is filled in place.
        parameter.grad = _like(parameter, gradient)
        self._gradients.append(gradient)
        if weight.numel():
            is_expert = self._layouts[name].is_expert
            rows = -(-parameter.shape[0] // self._mesh.copies(is_expert))
            start = rows * self._mesh.copy_rank(is_expert) * parameter.shape[1:].numel()
            self.parameter_shards.append(ParameterShard(name, start, weight.view(-1), gradient.view(-1)))

    def begin(self, num_micro_batches: int) -> None:  # noqa: ARG002
        """See GradientStore."""
        torch._foreach_zero_(self._gradients)
        for chunk in self._chunks:
            self._set_last(chunk, is_last=False)

    def expect_last_backward(self, chunk: int) -> None:
        """See GradientStore."""
        self._set_last(self._chunks[chunk], is_last=True)

    def _set_last(self, chunk: FSDPModule, *, is_last: bool) -> None:
        chunk.set_is_last_backward(is_last)
        if self._keeps_weights:
            chunk.set_reshard_after_backward(is_last)

    def finish(self) -> None:
        """See GradientStore. Only the sums within a replica remain to be made."""
        sum_shared_gradients(self.parameter_shards, self._layouts, self._mesh, self._groups)

    def weights_changed(self) -> None:
        """See GradientStore. Every unit gathers its weights again at its next use."""
        for unit in self._units:
            unit.reshard()

    def wait_for_weights(self) -> None:
        """See GradientStore. Returns at once: the parameters are the shards."""


def _like(other: DTensor, local: Tensor) -> DTensor:
    """A DTensor with the shape and the division of ``other``."""
    made: DTensor = DTensor.from_local(
        local, other.device_mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride()
    )
    return made


class _Sharding:
    """Shards the modules of a chunk in units."""

    def __init__(
        self,
        layouts: dict[str, ParameterLayout],
        groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None],
        device: torch.device,
        policy: MixedPrecisionPolicy,
        *,
        reshards: bool,
    ) -> None:
        self._layouts = layouts
        self._groups = groups
        self._device = device
        self._policy = policy
        self._reshards = reshards
        self._meshes: dict[bool, DeviceMesh] = {}

    def shard_chunk(self, chunk: nn.Module, names: dict[int, str], *, is_last_used: bool) -> FSDPModule:
        """Shard every layer and every other part with matrices as a unit.

        The rest of the chunk is the last unit.

        Args:
            chunk: a virtual stage.
            names: global names by the parameters' ids.
            is_last_used: the backward of the chunk follows right after its forward, so that the last part's weights
                need not be gathered again.
        """
        layouts = {parameter: self._layouts[names[id(parameter)]] for parameter in chunk.parameters()}
        parts, units = list(_parts(chunk, layouts)), []
        for part in parts:
            for experts in _topmost_experts(part, layouts):
                units.append(self._shard(experts, is_expert=True, reshards=self._reshards))
            keeps = is_last_used and part is parts[-1]
            unit = self._shard(part, is_expert=False, reshards=self._reshards and not keeps)
            if part is getattr(chunk, "embedding", None) and getattr(part, "project", None) is None:
                # The gradient of a table does not depend on the table's values. That of a projection's input does.
                unit.set_unshard_in_backward(False)
            units.append(unit)
        units.append(self._shard(chunk, is_expert=False, reshards=self._reshards and not is_last_used))
        _gather_ahead(units)
        return units[-1]

    def _shard(self, module: nn.Module, *, is_expert: bool, reshards: bool) -> FSDPModule:
        return fully_shard(module, mesh=self._mesh(is_expert), reshard_after_forward=reshards, mp_policy=self._policy)

    def _mesh(self, is_expert: bool) -> DeviceMesh:
        if is_expert not in self._meshes:
            group = self._groups[is_expert]
            assert group is not None, "a single replica shards nothing"
            self._meshes[is_expert] = DeviceMesh.from_group(group, self._device.type)
        return self._meshes[is_expert]


def _gather_ahead(units: Sequence[FSDPModule]) -> None:
    """Let backward of each unit prefetch the unit before it.

    ``units`` are in order of forward.

    By default fully_shard prefetches the unit that ran before it in time. With several micro-batches under way, the
    first unit would gather the last one for another micro-batch's forward or backward, too early or for nothing.
    """
    for before, unit in pairwise(units):
        unit.set_modules_to_backward_prefetch([before])
    # None would select the order in time again; the first unit itself is gathered already.
    units[0].set_modules_to_backward_prefetch([units[0]])


def _as_rows(weight: Tensor, layout: ParameterLayout) -> Tensor:
    """The same elements with the most entries in dim 0.

    Dim 0 of a gate-up pair, which has 2 entries, could be cut in two at most.
    """
    return weight.flatten(0, -2) if layout.is_matrix else weight.flatten()


def _parts(chunk: nn.Module, layouts: dict[nn.Parameter, ParameterLayout]) -> Iterator[nn.Module]:
    """Layers, and other children that hold matrices which no sibling shares.

    Children that share a parameter, such as embedding and head with a tied table, must be in one unit: the chunk's.
    """
    children = list(chunk.children())
    for child in children:
        if isinstance(child, nn.ModuleList):
            yield from child
            continue
        others = {parameter for other in children if other is not child for parameter in other.parameters()}
        own = list(child.parameters())
        if any(layouts[parameter].is_matrix for parameter in own) and not others.intersection(own):
            yield child


def _topmost_experts(module: nn.Module, layouts: dict[nn.Parameter, ParameterLayout]) -> Iterator[nn.Module]:
    """The largest modules below ``module`` whose parameters all belong to experts."""
    for child in module.children():
        is_expert = [layouts[parameter].is_expert for parameter in child.parameters()]
        if is_expert and all(is_expert):
            yield child
        elif any(is_expert):
            yield from _topmost_experts(child, layouts)
