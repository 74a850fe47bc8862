"""Training speed on one GPU: a 1B and a 3B Llama in bf16 at sequence 4096, ours beside a plain torch.compile loop.

    python -m benchmarks.gpu_speed [--models 1b 3b] [--write]
    python -m benchmarks.gpu_speed --models toy --device cpu --gemm-s 1      (does the script itself work?)

First the card's sustained matrix rate is measured, long enough that it gets warm. Then every trainer runs in a process
of its own. MFU is against the data sheet's peak and against that sustained rate, by two conventions: full, (6N + 12 l h
s) operations per token as in metrics.jsonl, and causal, which counts half of attention's.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import TrainConfig, build_config
from trainer.data.batches import MicroBatch
from trainer.device import device_name, peak_memory_bytes
from trainer.mesh import ParallelMesh, ProcessGroups
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.pipeline.executor import forward_backward
from trainer.planning.device_peaks import known_peak_tflops
from trainer.planning.flops import flops_per_token
from trainer.random_streams import StepRandomness
from trainer.train_state import build_model

TRAINERS = ("plain", "ours")
LIMIT_S = 580


@dataclass(frozen=True)
class Shape:
    """A Llama and its batch."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    sequence: int
    micro_batch: int

    def config(self, device: str) -> TrainConfig:
        """The training config; the plain loop reads its FLOPs from it too."""
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
    """Wait until the device has done what it was given."""
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
    """A Llama layer as one writes it by hand."""

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
        """[B, S, H] to [B, S, H]."""
        parts = self.qkv(self.norm1(x)).split(self.widths, -1)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """The whole model with its loss."""

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


def run_plain(shape: Shape, device: torch.device, steps: int) -> list[float]:
    """Seconds of each step of a compiled loop, bf16 by autocast over float32 weights."""
    model = Decoder(shape).to(device)
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
        float(loss)
        times.append(time.perf_counter() - start)
    return times


def run_ours(shape: Shape, device: torch.device, steps: int) -> list[float]:
    """Seconds of each step of our trainer."""
    config = shape.config(device.type)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model = build_model(config, shape.vocab, ParallelMesh.build(config, 0, 1), ProcessGroups(), device)
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


def measure(trainer: str, name: str, device: torch.device, steps: int) -> dict[str, float]:
    """Median step time and peak memory of one trainer, in this process."""
    run = run_plain if trainer == "plain" else run_ours
    times = run(SHAPES[name], device, 3 + steps)[3:]
    return {"step_s": statistics.median(times), "peak_gib": peak_memory_bytes(device) / 2**30}


def row(trainer: str, name: str, found: dict[str, float], gemm: float, peak: float | None, device: str) -> str:
    """One line of the table."""
    shape = SHAPES[name]
    config = shape.config(device)
    full = flops_per_token(config, shape.vocab)
    causal = full - 6 * shape.layers * shape.hidden * shape.sequence
    speed = shape.micro_batch * shape.sequence / found["step_s"]
    tflops, of_causal = speed * full / 1e12, speed * causal / 1e12
    sheet = f"{tflops / peak:.1%} / {of_causal / peak:.1%}" if peak else "-"
    return (
        f"| {name} | {trainer} | {speed:,.0f} | {tflops:.1f} / {of_causal:.1f} | {sheet} "
        f"| {tflops / gemm:.1%} / {of_causal / gemm:.1%} | {found['peak_gib']:.1f} |"
    )


def report(flags: argparse.Namespace) -> str:
    """Measure everything; the table as Markdown."""
    device = torch.device(flags.device)
    gemm = sustained_gemm_tflops(device, flags.gemm_s)
    peak = known_peak_tflops(device_name(device))
    driver = torch.version.cuda or "none"
    lines = [
        f"# Training speed on one device, {datetime.datetime.now(datetime.timezone.utc).date()}",
        "",
        f"{device_name(device)}, torch {torch.__version__}, CUDA {driver}; bf16, sequence 4096, AdamW; medians of "
        f"{flags.steps} steps after 3. Sustained bf16 matrix products over {flags.gemm_s:.0f} s: {gemm:.1f} TFLOP/s; "
        f"data sheet: {peak or 'unknown'}. Pairs are the full and the causal convention.",
        "",
        "| model | trainer | tokens/s | TFLOP/s | MFU of the data sheet | of the sustained rate | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in flags.models:
        for trainer in TRAINERS:
            argv = [sys.executable, "-m", "benchmarks.gpu_speed", "--device", flags.device, "--steps", str(flags.steps)]
            done = subprocess.run([*argv, "--one", trainer, name], capture_output=True, text=True, timeout=LIMIT_S)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"
                lines.append(f"| {name} | {trainer} | failed: {reason} | | | | |")
            else:
                found = json.loads(done.stdout.splitlines()[-1])
                lines.append(row(trainer, name, found, gemm, peak, flags.device))
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=("1b", "3b"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
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
