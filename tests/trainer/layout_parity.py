"""Parallel training against serial training: one iteration, or several, of the same tiny model on any layout.

Every rank reports its part of what it holds; here the parts are put together by their ParameterLayout into whole
tensors, copies are required to be equal bit for bit, and the whole is compared with the run on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from tests.trainer.spawn import DEADLINE_S, Ranks
from trainer.config import TrainConfig, build_config
from trainer.data.batches import MicroBatch
from trainer.mesh import ParallelMesh, build_process_groups
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.pipeline.executor import forward_backward
from trainer.random_streams import StepRandomness, seeded_generator
from trainer.train_state import ParallelModel, build_model

# Loss per token: absolute. Gradients before clipping and parameters after the last step: the worst element against the
# largest of the serial run's tensor. Norm: relative.
FP32_LIMITS = {"loss": 1e-5, "gradient": 1e-4, "parameter": 1e-5, "grad_norm": 1e-5}
# Adam divides by the root of the second moment: where the gradient is nothing but rounding (a key's bias has none), so
# is the direction of the step. Hence loss and norm of all ten steps are held strictly, parameters by their size.
CURVE_LIMITS = {"loss": 1e-5, "gradient": 1e-4, "parameter": 1e-2, "grad_norm": 1e-4}
# A bf16 number has 8 significant bits, an fp16 number 11 (2^-8 = 4e-3 and 2^-11 = 5e-4 between neighbours). Sums over
# tp and micro-batches round in another order, and the errors of a few layers add up.
BF16_LIMITS = {"loss": 5e-3, "gradient": 8e-2, "parameter": 2e-2, "grad_norm": 5e-3}
FP16_LIMITS = {"loss": 1e-3, "gradient": 1e-2, "parameter": 5e-3, "grad_norm": 2e-3}

SGD = {"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.0, "weight_decay": 0.1, "clip_grad": 1.0}
ADAM = {"optimizer": "adam", "lr": 1e-3, "lr_decay_style": "constant", "weight_decay": 0.1, "clip_grad": 1.0}


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh, with or without sequence parallelism."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}{'-sp' if self.sequence_parallel else ''}"


SERIAL = Layout()
LAYOUTS = tuple(
    Layout(tp, pp, dp, sequence_parallel)
    for tp in (1, 2, 4)
    for pp in (1, 2, 4)
    for dp in (1, 2, 4)
    for sequence_parallel in (False, True)
    if tp * pp * dp <= 8 and (tp > 1 or not sequence_parallel)
)


@dataclass(frozen=True)
class Case:
    """A model and a batch; ``micro_batches`` counts over all replicas."""

    name: str
    model: Mapping[str, Any]
    micro_batches: int = 4
    micro_batch_size: int = 2
    masked: bool = False
    training: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=lambda: SGD)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    iterations: int = 1
    vocab_size: int = 101
    limits: Mapping[str, float] = field(default_factory=lambda: FP32_LIMITS)

    def __str__(self) -> str:
        return self.name

    def config(self, layout: Layout) -> TrainConfig:
        """The training config of this case on ``layout``."""
        return build_config(
            {
                # Weights large enough that the loss is not just that of a uniform guess.
                "model": {
                    "num_layers": 4,
                    "hidden_size": 32,
                    "make_vocab_size_divisible_by": 8,
                    "init_method_std": 0.1,
                    **self.model,
                },
                "parallel": {
                    "tensor_model_parallel_size": layout.tp,
                    "pipeline_model_parallel_size": layout.pp,
                    "sequence_parallel": layout.sequence_parallel,
                    # Several buckets even in a model this small.
                    "ddp_bucket_size": 5000,
                    **self.parallel,
                },
                "training": {
                    "train_iters": 10,
                    "seq_length": 16,
                    "micro_batch_size": self.micro_batch_size,
                    "global_batch_size": self.micro_batch_size * self.micro_batches,
                    "device": "cpu",
                    "initial_loss_scale": 1024.0,
                    **self.training,
                },
                "optimizer": dict(self.optimizer),
                "data": {"mock_data": True},
            }
        )

    def batch(self, iteration: int) -> list[MicroBatch]:
        """The micro-batches of one global batch, those of all replicas."""
        generator = torch.Generator().manual_seed(77 + iteration)
        batch = []
        for index in range(self.micro_batches):
            window = torch.randint(0, self.vocab_size, (self.micro_batch_size, 17), generator=generator)
            # Each micro-batch keeps another share of its labels, the last but one next to none.
            share = 0.03 if index == self.micro_batches - 2 else (index + 1) / self.micro_batches
            mask = (
                (torch.rand((self.micro_batch_size, 16), generator=generator) < share).float() if self.masked else None
            )
            batch.append(MicroBatch(window[:, :-1].contiguous(), window[:, 1:].contiguous(), mask, index))
        return batch


GPT2 = {"num_attention_heads": 8, "hidden_dropout": 0.1, "attention_dropout": 0.1}
LLAMA = {
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 48,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
# What neither of the two above has together: biases of queries, keys and values alone, partly rotated heads, a tied
# table; and so much padding that three of four tp ranks hold nothing else of it.
QWEN = {
    **LLAMA,
    "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": False,
    "rotary_percent": 0.5,
    "make_vocab_size_divisible_by": 128,
}

CASES = (
    Case("gpt2", GPT2, masked=True),
    Case("llama", LLAMA, micro_batches=8, micro_batch_size=1),
    Case("qwen-no-overlap", QWEN, masked=True, parallel={"overlap_grad_reduce": False}),
)
CURVES = (
    Case("gpt2-adam", GPT2, masked=True, optimizer=ADAM, iterations=10, limits=CURVE_LIMITS),
    Case("llama-adam", LLAMA, optimizer=ADAM, iterations=10, limits=CURVE_LIMITS),
)
SIXTEEN_BIT = (
    Case("gpt2-bf16", GPT2, masked=True, training={"bf16": True}, limits=BF16_LIMITS),
    Case("llama-bf16", LLAMA, training={"bf16": True}, limits=BF16_LIMITS),
    Case("qwen-fp16", QWEN, masked=True, training={"fp16": True}, limits=FP16_LIMITS),
)


@dataclass(frozen=True)
class Part:
    """What one rank holds of one parameter."""

    tp_dim: int | None
    valid_rows: int | None
    gradient: np.ndarray
    """Of the first iteration, before clipping."""
    parameter: np.ndarray
    """After the last iteration."""


@dataclass(frozen=True)
class Report:
    """What one rank saw."""

    mesh: ParallelMesh
    loss_sums: list[float]
    grad_norms: list[float | None]
    parts: dict[str, Part]


@dataclass(frozen=True)
class Outcome:
    """What a layout computed, put together over its ranks."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]


Mutation = Callable[[ParallelModel, MixedPrecisionOptimizer, dict[str, Any]], None]
"""Breaks a model, its optimizer or the arguments of forward_backward on purpose."""


def train(rank: int, world_size: int, case: Case, layout: Layout, mutation: Mutation | None = None) -> Report:
    """Run the case on this rank."""
    config = case.config(layout)
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    model = build_model(config, case.vocab_size, mesh, groups, torch.device("cpu"))
    disturb_vectors(model)
    optimizer = MixedPrecisionOptimizer(config, model)
    loss_sums, grad_norms = [], []
    gradients: dict[str, np.ndarray] = {}
    for iteration in range(case.iterations):
        options: dict[str, Any] = {
            "micro_batches": case.batch(iteration)[mesh.dp_rank :: mesh.dp],
            "valid_tokens": valid_tokens(case, iteration),
            "loss_scale": optimizer.loss_scaler.scale,
            "randomness": StepRandomness(config.training.seed, iteration),
        }
        if mutation is not None:
            mutation(model, optimizer, options)
        loss_sums.append(float(forward_backward(model, **options)))
        if not iteration:
            scale = optimizer.loss_scaler.scale
            gradients = {name: model.gradients.main_grad(name).numpy() / scale for name in model.parameters}
        grad_norms.append(optimizer.step(config.optimizer.lr).grad_norm)
    parts = {
        name: Part(layout.tp_dim, layout.valid_rows, gradients[name], model.parameters[name].detach().float().numpy())
        for name, layout in model.layouts.items()
    }
    return Report(mesh, loss_sums, grad_norms, parts)


@torch.no_grad()
def disturb_vectors(model: ParallelModel) -> None:
    """Move biases from 0 and norms from 1, where a bias that is added twice or a lost scale would not show."""
    for name, layout in model.layouts.items():
        if not layout.decay:
            noise = torch.randn(layout.global_shape, generator=seeded_generator("cpu", "noise", name)) * 0.1
            model.parameters[name] += layout.shard(noise, model.mesh)


def valid_tokens(case: Case, iteration: int) -> int:
    """Labels that count in the global batch."""
    batch = case.batch(iteration)
    return sum(part.labels.numel() if part.loss_mask is None else int(part.loss_mask.sum()) for part in batch)


def run_layout(ranks: Ranks, case: Case, layout: Layout, mutation: Mutation | None = None) -> Outcome:
    """Train the case on ``layout`` and put the ranks' reports together."""
    return assemble(case, ranks.run(train, case, layout, mutation, world_size=layout.world_size))


def assemble(case: Case, reports: list[Report]) -> Outcome:
    """Whole tensors and losses per token out of the reports of all ranks.

    Raises:
        AssertionError: copies that should be the same differ, a parameter is missing, or vocabulary padding moved.
    """
    assert len({tuple(report.grad_norms) for report in reports}) == 1, "ranks disagree about the gradient's norm"
    sums = np.zeros(case.iterations)
    for report in reports:
        if report.mesh.computes_loss and report.mesh.tp_rank == 0:
            sums += report.loss_sums
        elif not report.mesh.computes_loss:
            assert not any(report.loss_sums), "a loss on a stage without head"
    tokens = [valid_tokens(case, iteration) for iteration in range(case.iterations)]
    norms = [norm for norm in reports[0].grad_norms if norm is not None]
    assert len(norms) == case.iterations, "an iteration was skipped"
    return Outcome(
        losses=list(sums / tokens),
        grad_norms=norms,
        gradients={name: whole for name, whole in _whole_tensors(reports, "gradient")},
        parameters={name: whole for name, whole in _whole_tensors(reports, "parameter")},
    )


def _whole_tensors(reports: list[Report], what: str) -> Iterator[tuple[str, np.ndarray]]:
    mesh = reports[0].mesh
    for name in dict.fromkeys(name for report in reports for name in report.parts):
        shards: dict[int, list[np.ndarray]] = {}
        for report in reports:
            if name in report.parts:
                shards.setdefault(report.mesh.tp_rank, []).append(getattr(report.parts[name], what))
        part = next(report.parts[name] for report in reports if name in report.parts)
        copies = [shard for tp_rank in range(mesh.tp) for shard in shards[tp_rank]]
        groups = [copies] if part.tp_dim is None else [shards[tp_rank] for tp_rank in range(mesh.tp)]
        for group in groups:
            assert all(np.array_equal(group[0], copy) for copy in group), f"copies of {what} of {name} differ"
        whole = groups[0][0] if part.tp_dim is None else np.concatenate([g[0] for g in groups], axis=part.tp_dim)
        if part.valid_rows is not None:
            assert not whole[part.valid_rows :].any(), f"vocabulary padding of {name} moved"
            whole = whole[: part.valid_rows]
        yield name, whole


@dataclass(frozen=True)
class Deviation:
    """How far a layout is from the serial run, worst over iterations and parameters."""

    loss: float
    """Absolute, per token."""
    gradient: float
    """Relative to the largest element of the parameter's serial gradient."""
    gradient_name: str
    parameter: float
    """Relative to the largest element of the serial parameter."""
    parameter_name: str
    grad_norm: float
    """Relative."""

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}  gradient {self.gradient:.1e} ({self.gradient_name})  "
            f"parameter {self.parameter:.1e} ({self.parameter_name})  norm {self.grad_norm:.1e}"
        )


def deviation(serial: Outcome, found: Outcome) -> Deviation:
    """Compare a layout with the serial run.

    Raises:
        AssertionError: the two do not even hold the same parameters of the same shapes.
    """
    assert serial.gradients.keys() == found.gradients.keys(), "not the same parameters"
    gradient, gradient_name = _worst(serial.gradients, found.gradients)
    parameter, parameter_name = _worst(serial.parameters, found.parameters)
    losses = np.abs(np.subtract(serial.losses, found.losses))
    norms = np.abs(np.subtract(serial.grad_norms, found.grad_norms)) / serial.grad_norms
    return Deviation(losses.max(), gradient, gradient_name, parameter, parameter_name, norms.max())


def _worst(serial: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> tuple[float, str]:
    def distance(name: str) -> float:
        assert serial[name].shape == found[name].shape, f"{name} has another shape"
        # A gradient that is nothing but zeros would hide everything.
        assert serial[name].any(), f"{name} is all zeros"
        # Not a number must not pass as small.
        worst = np.abs(serial[name] - found[name]).max() / np.abs(serial[name]).max()
        return float(worst) if np.isfinite(worst) else float("inf")

    return max((distance(name), name) for name in serial)


def problems(case: Case, found: Deviation) -> list[str]:
    """What lies outside of the case's limits; empty when the layout is right."""
    return [
        f"{what} is off by {getattr(found, what):.2e}, allowed {limit:.0e}"
        for what, limit in case.limits.items()
        if not getattr(found, what) <= limit
    ]
