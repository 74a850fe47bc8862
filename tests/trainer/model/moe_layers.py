"""One layer with experts in float64 on any layout, put together over its ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.trainer.spawn import DEADLINE_S, Ranks
from trainer.config.train_config import TrainConfig
from trainer.distributed.mesh import ParallelMesh, ProcessGroups, build_process_groups
from trainer.distributed.random_streams import seeded_generator
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.moe.layer import MoE
from trainer.model.sharding import ParameterBuilder, ParameterLayout
from trainer.planning.build_config import build_config

LENGTH, BATCH, HIDDEN, REPLICAS = 8, 2, 16, 2
AUX_LOSS_SCALE = 0.7

Mutation = Callable[[], AbstractContextManager[object]]
"""Makes a context manager that breaks the trainer on purpose."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh of one pipeline stage."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    sp: bool = False
    comm: str = "p2p"

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp

    def __str__(self) -> str:
        axes = "-".join(f"{axis}{getattr(self, axis)}" for axis in ("tp", "cp", "dp", "ep") if getattr(self, axis) > 1)
        return (axes or "serial") + "-sp" * self.sp + f"-{self.comm}" * (self.cp > 1)


@dataclass(frozen=True)
class Part:
    """Results of one rank after forward and backward of its replicas' micro-batches."""

    mesh: ParallelMesh
    outputs: list[torch.Tensor]
    """[S/c(/t), B, H] of each of its micro-batches."""
    input_grads: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    """Summed over the ranks that share a parameter."""
    layouts: dict[str, ParameterLayout]


@dataclass(frozen=True)
class Whole:
    """Results of all ranks, put together: outputs and input gradients [micro-batch, S, B, H]."""

    outputs: torch.Tensor
    input_grads: torch.Tensor
    gradients: dict[str, torch.Tensor]


def config_of(model: dict[str, object], layout: Layout) -> TrainConfig:
    """A config with this model and layout."""
    return build_config(
        {
            "model": {
                "num_layers": 1,
                "hidden_size": HIDDEN,
                "num_attention_heads": 4,
                "ffn_hidden_size": 24,
                "num_experts": 4,
                "init_method_std": 0.5,
                "attention_dropout": 0.0,
                **model,
            },
            "parallel": {
                "tensor_model_parallel_size": layout.tp,
                "context_parallel_size": layout.cp,
                "expert_model_parallel_size": layout.ep,
                "sequence_parallel": layout.sp,
                "cp_comm_type": layout.comm,
            },
            "training": {"train_iters": 1, "seq_length": LENGTH, "micro_batch_size": BATCH},
            "optimizer": {"lr": 1e-3},
        }
    )


def draw(name: str, *shape: int) -> torch.Tensor:
    """Normally distributed float64, the same for equal names."""
    return torch.randn(shape, generator=seeded_generator("cpu", name), dtype=torch.float64)


def build_layer(config: TrainConfig, mesh: ParallelMesh, groups: ProcessGroups) -> tuple[MoE, ParameterBuilder]:
    """This rank's part of the layer, with nonzero biases."""
    builder = ParameterBuilder(3, mesh, config.parallel.sequence_parallel, torch.float64, torch.device("cpu"))
    layer = MoE(config.model, builder, ParallelAxes.build(config, mesh, groups))
    with torch.no_grad():
        for name, parameter in builder.parameters.items():
            layout = builder.layouts[name]
            if not layout.decay:
                parameter += layout.shard(draw(name, *layout.global_shape), mesh)
    return layer, builder


def run_rank(
    rank: int, world_size: int, model: dict[str, object], layout: Layout, scale: float, mutation: Mutation | None
) -> Part:
    """Forward and backward of this rank's micro-batches."""
    del world_size
    config = config_of(model, layout)
    mesh = ParallelMesh(tp=layout.tp, pp=1, dp=layout.dp, cp=layout.cp, ep=layout.ep, rank=rank)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    axes = ParallelAxes.build(config, mesh, groups)
    outputs, input_grads = [], []
    with mutation() if mutation is not None else nullcontext():
        layer, builder = build_layer(config, mesh, groups)
        for number in range(mesh.dp_rank, REPLICAS, mesh.dp):

            def own(name: str, number: int = number) -> torch.Tensor:
                whole = draw(f"{name}{number}", LENGTH, BATCH, HIDDEN)
                return axes.tp.sequence_shard(axes.cp.shard(whole, 0)).clone()

            inputs = own("inputs").requires_grad_()
            output = layer(inputs, ForwardPass(aux_loss_scale=scale))
            output.backward(own("gradient"))
            assert inputs.grad is not None
            outputs.append(output.detach())
            input_grads.append(inputs.grad)
        gradients = {}
        for name, parameter in builder.parameters.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            _sum_copies(parameter.grad, builder.layouts[name], groups)
            gradients[name] = parameter.grad
    return Part(mesh, outputs, input_grads, gradients, builder.layouts)


def _sum_copies(gradient: torch.Tensor, layout: ParameterLayout, groups: ProcessGroups) -> None:
    over = [groups.expert_dp if layout.is_expert else groups.dp_cp, groups.tp if layout.partial_over_tp else None]
    for group in over:
        if group is not None:
            dist.all_reduce(gradient, group=group)


def run_layout(
    ranks: Ranks,
    model: dict[str, object],
    layout: Layout,
    scale: float = AUX_LOSS_SCALE,
    mutation: Mutation | None = None,
) -> Whole:
    """Forward and backward of both replicas' micro-batches on ``layout``.

    Raises:
        AssertionError: ranks differ in tensors that they share.
    """
    parts = ranks.run(run_rank, model, layout, scale, mutation, world_size=layout.world_size)
    return Whole(
        outputs=_whole_activations([(part.mesh, part.outputs) for part in parts], layout),
        input_grads=_whole_activations([(part.mesh, part.input_grads) for part in parts], layout),
        gradients={name: _whole_parameter(name, parts) for name in parts[0].gradients},
    )


def _whole_activations(parts: list[tuple[ParallelMesh, list[torch.Tensor]]], layout: Layout) -> torch.Tensor:
    config = config_of({}, layout)
    whole = torch.full((REPLICAS, LENGTH, BATCH, HIDDEN), torch.nan, dtype=torch.float64)
    for mesh, tensors in parts:
        axes = ParallelAxes.build(config, mesh, ProcessGroups())
        positions = axes.tp.sequence_shard(axes.cp.positions(LENGTH))
        for number, tensor in zip(range(mesh.dp_rank, REPLICAS, mesh.dp), tensors, strict=True):
            before = whole[number, positions]
            assert before.isnan().all() or torch.equal(before, tensor), "tp ranks differ in an activation"
            whole[number, positions] = tensor
    assert not whole.isnan().any(), "an activation is incomplete"
    return whole


def _whole_parameter(name: str, parts: list[Part]) -> torch.Tensor:
    whole = torch.full(parts[0].layouts[name].global_shape, torch.nan, dtype=torch.float64)
    for part in parts:
        [box] = part.layouts[name].boxes(part.mesh)
        place = tuple(slice(first, first + length) for first, length in zip(box.offset, box.shape, strict=True))
        mine = part.gradients[name].view(box.shape)
        assert whole[place].isnan().all() or torch.equal(whole[place], mine), f"copies of {name} differ"
        whole[place] = mine
    assert not whole.isnan().any(), f"{name} is incomplete"
    return whole


def distance(expected: Whole, found: Whole) -> tuple[float, str]:
    """The worst difference relative to the largest element of its tensor, and its place."""
    pairs = {
        "outputs": (expected.outputs, found.outputs),
        "input gradients": (expected.input_grads, found.input_grads),
        **{name: (gradient, found.gradients[name]) for name, gradient in expected.gradients.items()},
    }
    assert all(want.any() for want, _ in pairs.values()), "something is all zeros"
    return max((float((want - got).abs().max() / want.abs().max()), name) for name, (want, got) in pairs.items())
