"""Training speed of one trainer with one Llama in bf16 on one device, as a line of JSON.

    python -m benchmarks.gpu.speed ours 1b --micro-batches 8
    python -m benchmarks.gpu.speed ours toy --device cpu      # a test of the script

Trainers: `plain`, a hand-written Llama; `transformers`, Hugging Face's Llama (if installed); `ours`, on the backends
that `auto` takes; and `ours-reference`. The first two are compiled and keep float32 weights that autocast casts in
every step. Ours keeps 16-bit weights, and float32 masters in the optimizer, and is not compiled. MFU is relative to the
data sheet's peak, by two conventions: full, (6N + 12 l h s) operations per token as in metrics.jsonl, and causal, which
counts half of attention.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.train_config import TrainConfig
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.distributed.random_streams import StepRandomness
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.dispatch.setup import set_up_kernels
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import ParallelModel, build_model
from trainer.pipeline.executor import forward_backward
from trainer.planning.build_config import build_config
from trainer.planning.estimate.device_peaks import known_peak_tflops
from trainer.planning.flops import flops_per_token
from trainer.process.device import device_name, peak_memory_bytes

OURS = "ours"
OURS_REFERENCE = "ours-reference"
TRAINERS = ("plain", "transformers", OURS, OURS_REFERENCE)
WARM_UP = 2


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama and its batch, and the part of the optimizer's states that stays in CPU memory."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    sequence: int
    micro_batch: int
    offload: float = 0.0

    def config(self, device: str) -> TrainConfig:
        """The training config, also the source of FLOPs for the plain loop."""
        return build_config(
            {
                "model": {
                    "num_layers": self.layers,
                    "hidden_size": self.hidden,
                    "num_attention_heads": self.heads,
                    "num_query_groups": self.groups,
                    "ffn_hidden_size": self.ffn,
                    "position_embedding_type": "rope",
                    "rotary_base": 500000.0,
                    "normalization": "RMSNorm",
                    "swiglu": True,
                    "disable_bias_linear": True,
                    "untie_embeddings_and_output_weights": True,
                    "attention_dropout": 0.0,
                    "hidden_dropout": 0.0,
                    "vocab_size": self.vocab,
                },
                "training": {
                    "train_iters": 1,
                    "seq_length": self.sequence,
                    "micro_batch_size": self.micro_batch,
                    "bf16": True,
                    "device": device,
                },
                "optimizer": {"lr": 1e-4, "lr_decay_style": "constant", "adam_beta2": 0.95, **self.placement()},
                "data": {"mock_data": True},
            }
        )

    def placement(self) -> dict[str, Any]:
        """Keys of the optimizer's section for ``offload``."""
        return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": self.offload} if self.offload else {}


SHAPES = {
    "1b": Shape(16, 2048, 32, 8, 8192, 128256, 4096, 4),
    "3b": Shape(28, 3072, 24, 8, 8192, 128256, 4096, 1),
    "8b": Shape(32, 4096, 32, 8, 14336, 128256, 8192, 1, offload=0.5),
    "345m": Shape(24, 1024, 16, 16, 2816, 50304, 1024, 4),
    "toy": Shape(2, 64, 4, 2, 128, 512, 64, 2),
}


class Layer(nn.Module):
    """A hand-written Llama layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden // shape.heads
        self.widths = (shape.heads * width, shape.groups * width, shape.groups * width)
        self.width = width
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden, 1e-5), nn.RMSNorm(shape.hidden, 1e-5)
        self.qkv = nn.Linear(shape.hidden, sum(self.widths), bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        parts = self.qkv(self.norm1(x)).split(self.widths, -1)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """The model with its loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, 1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        width = shape.hidden // shape.heads
        angles = torch.outer(torch.arange(shape.sequence), 500000.0 ** -(torch.arange(0, width, 2) / width)).repeat(
            1, 2
        )
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def batches(shape: Shape, device: torch.device, count: int) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and labels of ``count`` micro-batches."""
    size = (count, shape.micro_batch, shape.sequence + 1)
    windows = torch.randint(0, shape.vocab, size, device=device)
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


class TransformersLlama(nn.Module):
    """Hugging Face's Llama with the loss of ``Decoder``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.groups,
            max_position_embeddings=shape.sequence,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
            dtype=torch.float32,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss."""
        return F.cross_entropy(self.model(input_ids=tokens).logits.flatten(0, 1).float(), labels.flatten())


Step = Callable[[], float]
"""One optimizer step; returns the loss after the device has finished."""


def compiled_step(build: Callable[[Shape], nn.Module], shape: Shape, device: torch.device, micro_batches: int) -> Step:
    """A compiled loop with autocast from float32 to bf16."""
    with device:
        model = build(shape)
    compiled = torch.compile(model) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    data = batches(shape, device, micro_batches)

    def step() -> float:
        total = torch.zeros((), device=device)
        for tokens, labels in data:
            with torch.autocast(device.type, torch.bfloat16):
                loss = compiled(tokens, labels) / micro_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


@torch.no_grad()
def draw(model: ParallelModel, device: torch.device) -> None:
    """Draw the matrices on the device: a CPU takes a minute for those of 3B, and their values change no time."""
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in model.parameters.items():
        if model.layouts[name].is_matrix:
            parameter.normal_(std=0.02, generator=generator)


def our_step(shape: Shape, device: torch.device, micro_batches: int, kernels: str) -> Step:
    """Our trainer's step with the kernel backend ``kernels``. Joins a process group of one rank."""
    config = shape.config(device.type)
    config = config.model_copy(update={"training": config.training.model_copy(update={"kernel_backend": kernels})})
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    settings = BuildSettings.from_variables(os.environ)
    selection = set_up_kernels(config, settings, device, torch.bfloat16, is_builder=True)
    print("\n".join(selection.lines()), file=sys.stderr, flush=True)
    mesh = ParallelMesh.build(config, 0, 1)
    model = build_model(config, shape.vocab, mesh, ProcessGroups(), device, selection.kernels, draws=False)
    draw(model, device)
    optimizer = MixedPrecisionOptimizer(config, model)
    data = [MicroBatch(*pair) for pair in batches(shape, device, micro_batches)]
    tokens = micro_batches * shape.micro_batch * shape.sequence
    numbers = itertools.count()

    def step() -> float:
        randomness = StepRandomness(1, next(numbers))
        loss = forward_backward(model, data, valid_tokens=tokens, loss_scale=1.0, randomness=randomness)
        optimizer.step(1e-4)
        return float(loss) / tokens

    return step


def step_of(trainer: str, shape: Shape, device: torch.device, micro_batches: int) -> Step:
    """The step of one of ``TRAINERS``."""
    if trainer in (OURS, OURS_REFERENCE):
        return our_step(shape, device, micro_batches, "auto" if trainer == OURS else "reference")
    return compiled_step(Decoder if trainer == "plain" else TransformersLlama, shape, device, micro_batches)


def measure(trainer: str, name: str, device: torch.device, micro_batches: int, steps: int) -> dict[str, Any]:
    """Speed, MFU, losses and peak memory of one trainer, in this process."""
    shape = SHAPES[name]
    began = time.perf_counter()
    step = step_of(trainer, shape, device, micro_batches)
    times, losses = [], []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - start)
    median = statistics.median(times[WARM_UP:])
    tokens = micro_batches * shape.micro_batch * shape.sequence
    full = flops_per_token(shape.config(device.type), shape.vocab)
    causal = full - 6 * shape.layers * shape.hidden * shape.sequence
    peak = known_peak_tflops(device_name(device))
    return {
        "model": name,
        "trainer": trainer,
        "sequence": shape.sequence,
        "micro_batch": shape.micro_batch,
        "micro_batches": micro_batches,
        "tokens_per_s": tokens / median,
        "step_s": times,
        "start_s": time.perf_counter() - began - sum(times),
        "tflops": full * tokens / median / 1e12,
        "mfu_full": peak and full * tokens / median / 1e12 / peak,
        "mfu_causal": peak and causal * tokens / median / 1e12 / peak,
        "peak_gib": peak_memory_bytes(device) / 2**30,
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches of each optimizer step")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    flags = parser.parse_args()
    found = measure(flags.trainer, flags.model, torch.device(flags.device), flags.micro_batches, flags.steps)
    print(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
