"""Training speed of 1B and 3B Llamas in bf16 on one GPU, against torch.compile.

    python -m benchmarks.gpu_speed [--models 1b 3b] [--write]
    python -m benchmarks.gpu_speed --models toy --device cpu --gemm-s 1      # a test of the script

The sequence length is 4096. First the GPU's sustained matrix-product rate is measured, long enough to warm it up. Then
the trainers take turns, each in a separate process: `plain`, a hand-written Llama; `transformers`, Hugging Face's Llama
(if installed); and ours. The first two are compiled and keep float32 weights that autocast casts in every step. Ours
keeps 16-bit weights, and float32 masters in the optimizer. A failed trainer is listed with the reason. MFU is relative
to the data sheet's peak and to the sustained rate, by two conventions: full, (6N + 12 l h s) operations per token as in
metrics.jsonl, and causal, which counts half of attention.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.train_config import TrainConfig
from trainer.data.samples.batches import MicroBatch
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.distributed.random_streams import StepRandomness
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.dispatch.setup import set_up_kernels
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward
from trainer.planning.build_config import build_config
from trainer.planning.device_peaks import known_peak_tflops
from trainer.planning.flops import flops_per_token
from trainer.process.device import device_name, peak_memory_bytes

OURS = "ours"
OURS_REFERENCE = f"{OURS} on reference kernels"
TRAINERS = ("plain", "transformers", OURS, OURS_REFERENCE)
WARM_UP = 3
LIMIT_S = 580


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama and its batch."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    sequence: int
    micro_batch: int

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
                "optimizer": {"lr": 1e-4, "lr_decay_style": "constant", "adam_beta2": 0.95},
                "data": {"mock_data": True},
            }
        )


SHAPES = {
    "1b": Shape(16, 2048, 32, 8, 8192, 128256, 4096, 4),
    "3b": Shape(28, 3072, 24, 8, 8192, 128256, 4096, 2),
    "toy": Shape(2, 64, 4, 2, 128, 512, 64, 2),
}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sustained_gemm_tflops(device: torch.device, seconds: float) -> float:
    """TFLOP/s of bf16 matrix products over the last half of ``seconds``."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rates: list[float] = []
    began = time.perf_counter()
    while (start := time.perf_counter()) - began < seconds:
        for _ in range(20):
            torch.mm(a, b)
        synchronize(device)
        rates.append(20 * 2 * size**3 / (time.perf_counter() - start) / 1e12)
    return statistics.median(rates[len(rates) // 2 :])


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


def batch(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random tokens and labels."""
    window = torch.randint(0, shape.vocab, (shape.micro_batch, shape.sequence + 1), device=device)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


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


def run_compiled(build: Callable[[Shape], nn.Module], shape: Shape, device: torch.device, steps: int) -> list[float]:
    """Seconds of each step of a compiled loop with autocast from float32 to bf16."""
    with device:
        model = build(shape)
    compiled = torch.compile(model) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    tokens, labels = batch(shape, device)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        times.append(time.perf_counter() - start)
    return times


def run_ours(shape: Shape, device: torch.device, steps: int, kernels: str) -> list[float]:
    """Seconds of each step of our trainer with the kernel backend ``kernels``."""
    config = shape.config(device.type)
    config = config.model_copy(update={"training": config.training.model_copy(update={"kernel_backend": kernels})})
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    settings = BuildSettings.from_variables(os.environ)
    selection = set_up_kernels(config, settings, device, torch.bfloat16, is_builder=True)
    print("\n".join(selection.lines()), file=sys.stderr, flush=True)
    mesh = ParallelMesh.build(config, 0, 1)
    model = build_model(config, shape.vocab, mesh, ProcessGroups(), device, selection.kernels)
    optimizer = MixedPrecisionOptimizer(config, model)
    tokens, labels = batch(shape, device)
    times = []
    for step in range(steps):
        start = time.perf_counter()
        loss = forward_backward(
            model,
            [MicroBatch(tokens, labels)],
            valid_tokens=labels.numel(),
            loss_scale=1.0,
            randomness=StepRandomness(1, step),
        )
        optimizer.step(1e-4)
        float(loss)
        times.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return times


def measure(trainer: str, name: str, device: torch.device, steps: int) -> dict[str, Any]:
    """Step times and peak memory of one trainer, in this process."""
    shape = SHAPES[name]
    if trainer in (OURS, OURS_REFERENCE):
        times = run_ours(shape, device, WARM_UP + steps, "reference" if trainer == OURS_REFERENCE else "auto")
    else:
        times = run_compiled(Decoder if trainer == "plain" else TransformersLlama, shape, device, WARM_UP + steps)
    return {"steps_s": times[WARM_UP:], "peak_gib": peak_memory_bytes(device) / 2**30}


class RunFailed(Exception):
    """A trainer did not finish; the message is the reason."""


@dataclass
class Result:
    """Timed steps of one trainer with one model, over all rounds."""

    steps_s: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    failure: str = ""


def run_once(trainer: str, name: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Run ``measure`` in a separate process.

    Raises:
        RunFailed: the process failed, or did not end within the limit.
    """
    argv = [sys.executable, "-m", "benchmarks.gpu_speed", "--device", flags.device, "--steps", str(flags.steps)]
    try:
        done = subprocess.run([*argv, "--one", trainer, name], capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"still running after {LIMIT_S} s") from None
    if done.returncode:
        raise RunFailed(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def take_turns(name: str, flags: argparse.Namespace) -> dict[str, Result]:
    """Measure all trainers with one model. Every round starts with another trainer."""
    results = {trainer: Result() for trainer in TRAINERS}
    for number in range(flags.rounds):
        first = number % len(TRAINERS)
        for trainer in TRAINERS[first:] + TRAINERS[:first]:
            result = results[trainer]
            if result.failure:
                continue
            print(f"round {number + 1}: {trainer} {name}", file=sys.stderr, flush=True)
            try:
                found = run_once(trainer, name, flags)
            except RunFailed as failure:
                result.failure = str(failure)
            else:
                result.steps_s += found["steps_s"]
                result.peak_gib = max(result.peak_gib, found["peak_gib"])
    return results


def row(trainer: str, name: str, result: Result, gemm: float, peak: float | None, device: str) -> str:
    """One line of the table."""
    if result.failure:
        return f"| {name} | {trainer} | failed: {result.failure} | | | | |"
    shape = SHAPES[name]
    config = shape.config(device)
    full = flops_per_token(config, shape.vocab)
    causal = full - 6 * shape.layers * shape.hidden * shape.sequence
    speed = shape.micro_batch * shape.sequence / statistics.median(result.steps_s)
    tflops, of_causal = speed * full / 1e12, speed * causal / 1e12
    sheet = f"{tflops / peak:.1%} / {of_causal / peak:.1%}" if peak else "-"
    return (
        f"| {name} | {trainer} | {speed:,.0f} | {tflops:.1f} / {of_causal:.1f} | {sheet} "
        f"| {tflops / gemm:.1%} / {of_causal / gemm:.1%} | {result.peak_gib:.1f} |"
    )


def report(flags: argparse.Namespace) -> str:
    """Measure everything, and return the table as Markdown."""
    device = torch.device(flags.device)
    gemm = sustained_gemm_tflops(device, flags.gemm_s)
    peak = known_peak_tflops(device_name(device))
    driver = torch.version.cuda or "none"
    shapes = "; ".join(
        f"{name} has {SHAPES[name].layers} layers of {SHAPES[name].hidden}, sequence {SHAPES[name].sequence}"
        for name in flags.models
    )
    lines = [
        f"# Training speed on one device, {datetime.datetime.now(datetime.timezone.utc).date()}",
        "",
        f"{device_name(device)}, torch {torch.__version__}, CUDA {driver}; bf16, AdamW; {shapes}. Medians over "
        f"{flags.rounds} rounds of {flags.steps} steps after {WARM_UP}, trainers in turn. Sustained bf16 "
        f"matrix products over {flags.gemm_s:.0f} s: {gemm:.1f} TFLOP/s; data sheet: {peak or 'unknown'}. Pairs are "
        "the full and the causal convention.",
        "plain and transformers are compiled loops over float32 weights, which autocast casts in every step; ours has "
        "16-bit weights, with float32 masters in the optimizer, and is not compiled.",
        "",
        "| model | trainer | tokens/s | TFLOP/s | MFU of the data sheet | of the sustained rate | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in flags.models:
        for trainer, result in take_turns(name, flags).items():
            lines.append(row(trainer, name, result, gemm, peak, flags.device))
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=("1b", "3b"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each round")
    parser.add_argument("--gemm-s", type=float, default=60.0, help="seconds of matrix products")
    parser.add_argument("--one", nargs=2, metavar=("TRAINER", "MODEL"), help="measure one in this process, as JSON")
    parser.add_argument("--write", action="store_true", help="also write the table to benchmarks/results")
    flags = parser.parse_args()
    if flags.one:
        print(json.dumps(measure(*flags.one, torch.device(flags.device), flags.steps)))
        return
    text = report(flags)
    print(text)
    if flags.write:
        day = datetime.datetime.now(datetime.timezone.utc).date()
        Path(__file__).with_name("results").joinpath(f"gpu_speed-{day}.md").write_text(text)


if __name__ == "__main__":
    main()
