"""Workload and meter of all adapters. Needs only torch and numpy.

A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, no biases, untied head, no dropout, in float32. AdamW with a
constant learning rate, no weight decay, and clipping over the whole model.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
EPSILON = 1e-8
CLIP_GRAD = 1.0
NORM_EPSILON = 1e-5
ROTARY_BASE = 10000
BATCHES_IN_CORPUS = 32


@dataclass(frozen=True)
class Workload:
    """Shape of a model and of its batches."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    sequence: int
    vocab: int
    micro_batch: int
    global_batch: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step, of all model replicas together."""
        return self.global_batch // self.micro_batch

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch * self.sequence

    @property
    def parameters(self) -> int:
        """Number of weights."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return 2 * self.vocab * self.hidden + self.layers * layer + self.hidden


WORKLOADS = {
    "tiny": Workload(4, 256, 4, 688, 256, 4096, 2, 8),
    "small": Workload(8, 512, 8, 1376, 512, 32000, 1, 4),
}


def initial_weights(work: Workload) -> dict[str, torch.Tensor]:
    """Initial weights by their names in Hugging Face's Llama, drawn in a fixed order."""
    generator = torch.Generator().manual_seed(1234)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    weights = {"model.embed_tokens.weight": draw(work.vocab, work.hidden)}
    for layer in range(work.layers):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            weights[f"{prefix}self_attn.{name}_proj.weight"] = draw(work.hidden, work.hidden)
        for name in ("gate", "up"):
            weights[f"{prefix}mlp.{name}_proj.weight"] = draw(work.ffn, work.hidden)
        weights[f"{prefix}mlp.down_proj.weight"] = draw(work.hidden, work.ffn)
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(work.hidden)
        weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(work.hidden)
    weights["model.norm.weight"] = torch.ones(work.hidden)
    weights["lm_head.weight"] = draw(work.vocab, work.hidden)
    return weights


def corpus(work: Workload) -> torch.Tensor:
    """Learnable tokens [batch, sample, sequence + 1].

    Three of five are determined by their predecessor.
    """
    random = np.random.default_rng(7)
    count = BATCHES_IN_CORPUS * work.global_batch * (work.sequence + 1)
    rare = np.minimum(random.zipf(1.3, count) - 1, work.vocab - 1)
    successor = random.permutation(work.vocab)
    follows = random.random(count) < 0.6
    tokens = np.zeros(count, np.int64)
    for i in range(1, count):
        tokens[i] = successor[tokens[i - 1]] if follows[i] else rare[i]
    return torch.from_numpy(tokens).view(BATCHES_IN_CORPUS, work.global_batch, work.sequence + 1)


def micro_batches(
    work: Workload, tokens: torch.Tensor, step: int, replica: int = 0, replicas: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (tokens, labels) of one replica in one step, [micro_batch, sequence] each."""
    parameter_shards = tokens[step % BATCHES_IN_CORPUS].split(work.micro_batch)[replica::replicas]
    return [(shard[:, :-1].contiguous(), shard[:, 1:].contiguous()) for shard in parameter_shards]


@dataclass(frozen=True)
class Task:
    """Task of one rank, set by the driver's flags."""

    work: Workload
    tp: int
    pp: int
    dp: int
    schedule: str
    kernels: str
    steps: int
    rank: int
    report: Path

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step of one model replica."""
        return self.work.micro_batches // self.dp

    def join(self) -> None:
        """Join the process group through a file.

        A free port may be taken before its use.
        """
        rendezvous = f"file://{self.report}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=self.rank, world_size=self.world)


def task_from_command_line() -> Task:
    """Parse the flags of all adapters, and set torch's number of threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=WORKLOADS, required=True)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel size")
    parser.add_argument("--schedule", default="1f1b", help="pipeline schedule, for trainers with several")
    parser.add_argument("--kernels", default="auto", help="backend of fused kernels, for trainers with fused kernels")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True, help="folder for this rank's measurements")
    flags = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return Task(
        work=WORKLOADS[flags.model],
        tp=flags.tp,
        pp=flags.pp,
        dp=flags.dp,
        schedule=flags.schedule,
        kernels=flags.kernels,
        steps=flags.steps,
        rank=int(os.environ["RANK"]),
        report=flags.report,
    )


class Meter:
    """Wall and CPU time, loss and gradient norm of every step of this rank."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._steps: list[dict[str, float | None]] = []
        self._start()

    def _start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def step(self, loss: torch.Tensor | float | None, grad_norm: torch.Tensor | float) -> None:
        """Record a step. Call once after each optimizer step.

        Args:
            loss: mean over the tokens of this rank's replica; None on ranks without the loss. Replicas have equal
                numbers of tokens, so the mean over replicas is the loss of the step.
            grad_norm: gradient norm of the whole model.
        """
        # Inside the measured time, because float() waits for the values.
        loss, grad_norm = None if loss is None else float(loss), float(grad_norm)
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self._steps.append({"wall_s": wall, "cpu_s": cpu, "loss": loss, "grad_norm": grad_norm})
        self._start()

    def write(self, version: str) -> None:
        """Write this rank's measurements for the driver."""
        # VmHWM restarts at exec; getrusage's maximum is inherited from the parent process.
        status = Path("/proc/self/status").read_text()
        peak_kib = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
        report = {"version": version, "torch": torch.__version__, "peak_mib": peak_kib / 1024, "steps": self._steps}
        (self._task.report / f"rank-{self._task.rank}.json").write_text(json.dumps(report))
