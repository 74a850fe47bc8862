"""Speed of saves and loads of a checkpoint, beside raw writes and reads of the same bytes.

    python -m benchmarks.checkpoint_saves [--ranks 1] [--gb 1] [--rounds 5] [--folder FOLDER] [--write]

Every rank has its part of a model in fp32 with Adam, divided by tensor parallelism. ``raw`` is a plain loop that writes
as many bytes as the rank's files have, in blocks of 8 MiB, and then calls fsync. A save writes the same bytes with
checksums, reads a sample back and publishes it. An asynchronous save is copied and drained by a thread; its speed is
that of both. Training goes on meanwhile: a forward and backward pass of one sample of 128 tokens, then the wait of the
optimizer for the copies, then further work. It either computes on this rank's one thread, or sleeps as long, as a rank
that waits for its GPU. Before each load or raw read the system drops the files from its cache. The variants take turns,
a round each; the table has the median and the spread over all rounds, each from the start of the first rank to the end
of the last. The exit code is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer.spawn import Ranks
from trainer.checkpoint.directory import checkpoint_path
from trainer.checkpoint.resume import restore
from trainer.checkpoint.save import CheckpointWriter
from trainer.checkpoint.saving.draining import Draining
from trainer.checkpoint.saving.host_copy import HostCopy, copied_bytes
from trainer.config.train_config import TrainConfig
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward
from trainer.planning.build_config import build_config
from trainer.process.progress import TrainingProgress

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
BLOCK_BYTES = 8 << 20
HIDDEN, VOCAB_SIZE = 768, 16384
BYTES_OF_PARAMETER = 12
SPEED_GOAL, BLOCKED_GOAL, LOAD_GOAL = 0.8, 0.1, 2.0
SEQ_LENGTH, PAUSE_S, DEADLINE_S = 128, 0.05, 3600.0
RAW, SYNC, WAITING, COMPUTING = "raw write and fsync", "save", "drain, steps wait", "drain, steps compute"
RAW_READ, LOAD = "raw read", "load"

Seconds = dict[str, tuple[float, float, float]]
"""Variant -> start, end, and time for which the training waited. By the machine's monotonic clock."""


def config_of(ranks: int, gb: float) -> TrainConfig:
    """A model of as many layers as make a state of about ``gb`` GB."""
    of_layer = 12 * HIDDEN * HIDDEN
    layers = max(1, round((gb * 1e9 / BYTES_OF_PARAMETER - VOCAB_SIZE * HIDDEN) / of_layer))
    return build_config(
        {
            "model": {"num_layers": layers, "hidden_size": HIDDEN, "num_attention_heads": 12},
            "parallel": {"tensor_model_parallel_size": ranks},
            "training": {"train_iters": 10, "seq_length": SEQ_LENGTH, "device": "cpu"},
            "optimizer": {"lr": 1e-4},
            "data": {"mock_data": True},
        }
    )


class Rank:
    """One rank's measurements. All methods are collective."""

    def __init__(self, rank: int, world_size: int, folder: Path, gb: float) -> None:
        self.rank = rank
        self.root = folder / "checkpoints"
        self.raw = folder / f"raw-{rank}"
        self.config = config_of(world_size, gb)
        mesh = ParallelMesh.build(self.config, rank, world_size)
        groups = build_process_groups(mesh, timedelta(minutes=10))
        self.model = build_model(self.config, VOCAB_SIZE, mesh, groups, CPU)
        self.optimizer = MixedPrecisionOptimizer(self.config, self.model)
        for tensors in self.optimizer.tensors().values():
            for tensor in tensors.values():
                tensor.normal_()
        self.writer = CheckpointWriter(self.root, self.config, VOCAB_SIZE, 1, CPU)
        self.writer.prepare(rank)
        self.beside = self.writer.beside_training()
        self.memory, self.iteration = HostCopy(CPU), 0
        self.size = copied_bytes(self.writer.stage(self.model, self.optimizer, TrainingProgress()))
        self.memory.reserve(self.size)
        self.buffer = torch.randint(0, 255, (self.size,), dtype=torch.uint8)
        self.matrix = torch.ones(384, 384)
        self.batch = [MicroBatch(*torch.randint(0, VOCAB_SIZE, (2, 1, SEQ_LENGTH)))]
        # The first one takes memory and loads kernels.
        self.pass_s = [self.timed_pass() for _ in range(2)][-1]

    def round(self) -> Seconds:
        """Each variant once."""
        found: Seconds = {}
        for name, measure in (
            (RAW, self.write_raw),
            (SYNC, self.save),
            (WAITING, lambda: self.save_beside(lambda: time.sleep(self.pass_s), lambda: time.sleep(PAUSE_S))),
            (COMPUTING, lambda: self.save_beside(self.forward_backward, self.compute)),
        ):
            self.clear()
            found[name] = measure()
        self.drop_caches()
        found[LOAD] = self.load()
        self.write_raw()
        self.drop_caches()
        found[RAW_READ] = self.read_raw()
        return found

    def clear(self) -> None:
        """Delete all files, and let the disk come to rest."""
        dist.barrier()
        self.raw.unlink(missing_ok=True)
        if self.rank == 0:
            for checkpoint in self.root.iterdir():
                shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
            os.sync()
        dist.barrier()

    def drop_caches(self) -> None:
        """Drop the pages of all files."""
        dist.barrier()
        if self.rank == 0:
            os.sync()
            for path in self.root.parent.rglob("*"):
                if path.is_file():
                    descriptor = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)
        dist.barrier()

    def write_raw(self) -> tuple[float, float, float]:
        """Write the bytes of this rank, and wait for the disk."""
        began, view = time.monotonic(), memoryview(self.buffer.numpy())
        with self.raw.open("wb", buffering=0) as file:
            for first in range(0, self.size, BLOCK_BYTES):
                file.write(view[first : first + BLOCK_BYTES])
            os.fsync(file.fileno())
        ended = time.monotonic()
        return began, ended, ended - began

    def read_raw(self) -> tuple[float, float, float]:
        """Read them."""
        began, block = time.monotonic(), bytearray(BLOCK_BYTES)
        with self.raw.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
        ended = time.monotonic()
        return began, ended, ended - began

    def save(self) -> tuple[float, float, float]:
        """Save between two steps."""
        self.iteration += 1
        began = time.monotonic()
        progress = TrainingProgress(iteration=self.iteration)
        assert self.writer.save(self.model, self.optimizer, progress, deletes_old=False) is None
        ended = time.monotonic()
        return began, ended, ended - began

    def save_beside(self, first: Callable[[], None], further: Callable[[], None]) -> tuple[float, float, float]:
        """Save beside a pass and ``further`` work, which is repeated until the end."""
        self.iteration += 1
        draining: Draining[float] = Draining()
        began, progress = time.monotonic(), TrainingProgress(iteration=self.iteration)
        staged = self.beside.stage(self.model, self.optimizer, progress, self.memory)

        def drain() -> float:
            assert self.beside.drain(staged, deletes_old=False).missed is None
            return time.monotonic()

        assert staged.snapshot is not None
        draining.begin(drain)
        first()
        staged.snapshot.before_change()
        while not draining.has_ended:
            further()
        return began, draining.take(), staged.waited_s

    def forward_backward(self) -> None:
        """The pass of one sample. Collective: all ranks."""
        forward_backward(
            self.model, self.batch, valid_tokens=SEQ_LENGTH, loss_scale=1.0, randomness=StepRandomness(7, 0)
        )

    def timed_pass(self) -> float:
        """The time of a pass, in seconds."""
        began = time.monotonic()
        self.forward_backward()
        return time.monotonic() - began

    def compute(self) -> None:
        """Work of this rank's thread."""
        until = time.monotonic() + PAUSE_S
        while time.monotonic() < until:
            torch.mm(self.matrix, self.matrix)

    def load(self) -> tuple[float, float, float]:
        """Load the newest checkpoint."""
        began, progress = time.monotonic(), TrainingProgress()
        found = restore(self.config, self.root, self.model, self.optimizer, progress, CPU)
        assert found == checkpoint_path(self.root, self.iteration)
        ended = time.monotonic()
        return began, ended, ended - began


def measure(rank: int, world_size: int, folder: Path, gb: float, rounds: int) -> tuple[int, float, list[Seconds]]:
    """Bytes of this rank, the time of a pass, and its times; a first round warms up."""
    here = Rank(rank, world_size, folder, gb)
    return here.size, here.pass_s, [here.round() for _ in range(rounds + 1)][1:]


@dataclass(frozen=True)
class Table:
    """All rounds of all ranks.

    Attributes:
        size: of all ranks' parts, in bytes.
        by_rank: the rounds of each rank.
    """

    size: int
    by_rank: list[list[Seconds]]

    def seconds(self, name: str) -> list[float]:
        """Time of a variant in each round, from the first start to the last end."""
        together = (([of_rank[name] for of_rank in ranks]) for ranks in zip(*self.by_rank, strict=True))
        return [max(end for _, end, _ in times) - min(start for start, _, _ in times) for times in together]

    def blocked(self, name: str) -> list[float]:
        """Time for which the slowest rank's training waited, in each round."""
        return [max(of_rank[name][2] for of_rank in ranks) for ranks in zip(*self.by_rank, strict=True)]

    def ratios(self, name: str, other: str) -> list[float]:
        """Speed as a multiple of that of another variant in the same round."""
        return [base / seconds for seconds, base in zip(self.seconds(name), self.seconds(other), strict=True)]

    def rows(self) -> list[str]:
        """One line per variant."""
        lines = [
            "| variant | s | spread | MB/s | of raw | training waits, s |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name in (RAW, SYNC, WAITING, COMPUTING, RAW_READ, LOAD):
            seconds, raw = self.seconds(name), RAW_READ if name in (LOAD, RAW_READ) else RAW
            median = statistics.median(seconds)
            waits = f"{statistics.median(self.blocked(name)):.2f}" if name in (SYNC, WAITING, COMPUTING) else ""
            lines.append(
                f"| {name} | {median:.2f} | {min(seconds):.2f} to {max(seconds):.2f} | {self.size / 1e6 / median:.0f} "
                f"| {statistics.median(self.ratios(name, raw)):.0%} | {waits} |"
            )
        return lines

    def missed(self) -> list[str]:
        """The goals that are missed."""
        found = []
        share = statistics.median(self.ratios(WAITING, RAW))
        blocked = statistics.median(self.blocked(WAITING)) / statistics.median(self.seconds(SYNC))
        if share < SPEED_GOAL:
            found.append(f"{WAITING}: {share:.0%} of the raw speed, instead of {SPEED_GOAL:.0%}")
        if blocked > BLOCKED_GOAL:
            found.append(
                f"{WAITING}: training waits for {blocked:.0%} of the time of a save, instead of {BLOCKED_GOAL:.0%}"
            )
        slower = 1 / statistics.median(self.ratios(LOAD, RAW_READ))
        if slower > LOAD_GOAL:
            found.append(f"a load takes {slower:.1f} times as long as a raw read, instead of {LOAD_GOAL:g}")
        return found


def processor() -> str:
    """Name of the processor."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} x {line.partition(':')[2].strip()}"
    return platform.processor()


def main() -> int:
    """Measure and print; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the file system to measure (default: the temporary folder)")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    options = parser.parse_args()
    lines = [
        f"{processor()}, 1 thread per rank, {datetime.date.today()}, torch {torch.__version__}; medians of "
        f"{options.rounds} rounds:"
    ]
    missed = []
    for count in options.ranks:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
            ranks = stack.enter_context(Ranks(count, deadline_s=DEADLINE_S))
            results = ranks.run(measure, folder, options.gb, options.rounds)
        table = Table(sum(size for size, _, _ in results), [rounds for _, _, rounds in results])
        title = f"{count} rank{'s' if count > 1 else ''}, {table.size / 1e9:.2f} GB"
        title += f", a pass of {statistics.median(seconds for _, seconds, _ in results):.2f} s"
        lines += ["", f"{title}:", "", *table.rows()]
        missed += [f"{title}: {goal}" for goal in table.missed()]
    lines += ["", f"Goals missed: {'; '.join(missed) or 'none'}."]
    print("\n".join(lines))
    if options.write:
        path = RESULTS / f"checkpoint_saves-{datetime.date.today()}.md"
        path.write_text("\n".join([f"# Saves and loads of checkpoints, {datetime.date.today()}", "", *lines, ""]))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
