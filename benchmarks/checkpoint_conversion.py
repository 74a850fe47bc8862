"""Speed and memory of `llmctl checkpoint import` and `export`, beside a plain copy of the same files.

    python -m benchmarks.checkpoint_conversion --layers 32 --folder /scratch --write

Writes a Llama with random bfloat16 weights and the shape of Llama 2 7B (13.5 GB with all of its 32 layers; the largest
tensor, 262 MB, is there with any number). Then each round copies its files (reads and writes 16 MB at a time, and
fsync), imports it, copies the files of the checkpoint, and exports it. The order of copy and conversion changes from
round to round.
Every step is a process of its own, and begins with its source out of the page cache as far as the kernel lets go of it;
the written file is on the disk when a step ends. Memory is the largest resident set of the process (getrusage), less
that of a process that only imports the program. The bound is twice the largest tensor plus 500 MB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trainer.conversion.file_plan import Unit, finish, plan_files, write_files
from trainer.families.llama import LLAMA
from trainer.hub.folder import CONFIG, INDEX
from trainer.hub.tensor_file import Planned

ROOT = Path(__file__).parents[1]
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Touvron et al. 2023 (arXiv:2307.09288), table 1; config.json of meta-llama/Llama-2-7b-hf."""
LARGEST_BYTES = 2 * 32000 * 4096
BOUND_BYTES = 2 * LARGEST_BYTES + 500_000_000
_FILE_BYTES = 5_000_000_000
_COPY = "import sys; from benchmarks.checkpoint_conversion import copy_files; copy_files(*sys.argv[1:])"
_IDLE = "import trainer.commands.checkpoint"
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Found:
    """Cost of one step."""

    step: str
    wall_s: float
    cpu_s: float
    peak_bytes: int


def make_folder(folder: Path, layers: int) -> int:
    """Write the Hugging Face folder; returns the size of its tensors."""
    from trainer.families.catalogue import read_model

    keys = {**SHAPE, "num_hidden_layers": layers}
    _, model = read_model(keys, CONFIG)
    units = []
    for rule in LLAMA.weights(model):
        for name in rule.theirs:
            shape = _shape(name)
            units.append(Unit((Planned(name, torch.bfloat16, shape),), partial(_random, shape)))
    files = plan_files(units, _FILE_BYTES, lambda n, count: f"model-{n:05d}-of-{count:05d}.safetensors")
    write_files(folder, files, "", lambda _: None)
    finish(folder)
    places = {tensor.name: file.name for file in files for unit in file.units for tensor in unit.planned}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / CONFIG).write_text(json.dumps(keys))
    return sum(unit.bytes for unit in units)


def _shape(name: str) -> tuple[int, ...]:
    hidden, width = 4096, 11008
    if "norm" in name:
        return (hidden,)
    if "embed_tokens" in name or "lm_head" in name:
        return (32000, hidden)
    if "down_proj" in name:
        return (hidden, width)
    return (width, hidden) if "mlp" in name else (hidden, hidden)


def _random(shape: Sequence[int]) -> Iterator[Tensor]:
    yield torch.randint(-(1 << 15), 1 << 15, tuple(shape), dtype=torch.int16).view(torch.bfloat16)


def copy_files(source: str, target: str) -> None:
    """Copy the safetensors of a folder in the simplest way."""
    Path(target).mkdir()
    for path in sorted(Path(source).glob("*.safetensors")):
        with path.open("rb", buffering=0) as read, (Path(target) / path.name).open("wb", buffering=0) as written:
            block = bytearray(_BLOCK_BYTES)
            while count := read.readinto(block):
                written.write(memoryview(block)[:count])
            os.fsync(written.fileno())


def forget(folder: Path) -> None:
    """Ask the kernel to drop a folder's files from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(step: str, command: Sequence[str], source: Path | None = None) -> Found:
    """Run a command once.

    Raises:
        RuntimeError: it failed.
    """
    if source is not None:
        forget(source)
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{step}: {log.read()[-800:]}")
    return Found(step, time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def measure(folder: Path, number: int) -> Iterator[Found]:
    """One round: the four steps. The conversion comes first in every second round."""
    hub, native, copy, again = (folder / name for name in ("hub", "native", "copy", "again"))
    checkpoint = native / "iter_0000000"
    command = ["-m", "trainer", "checkpoint"]
    imports = ("import", [*command, "import", str(hub), "--output", str(native)], hub)
    exports = ("export", [*command, "export", str(native), "--output", str(again), "--no-verify"], checkpoint)
    for convert, source in ((imports, hub), (exports, checkpoint)):
        copies = (f"copy before {convert[0]}", ["-c", _COPY, str(source), str(copy)], source)
        for step in (copies, convert) if number % 2 == 0 else (convert, copies):
            yield run(*step)
            shutil.rmtree(copy, ignore_errors=True)
    for done in (native, again):
        shutil.rmtree(done)


def report(layers: int, size: int, idle: Found, found: Sequence[Found]) -> str:
    """The measurement as text."""
    lines = [
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}, {os.cpu_count()} CPUs, "
        f"load average {os.getloadavg()[0]:.1f}. Shape of Llama 2 7B with {layers} layers, {size / 1e9:.2f} GB in "
        f"bfloat16, largest tensor {LARGEST_BYTES / 1e6:.0f} MB. Bound of memory: {BOUND_BYTES / 1e6:,.0f} MB over the "
        f"{idle.peak_bytes / 1e6:.0f} MB of a process that only imports the program. Times include the start of the "
        "process.",
        "",
        "| step | MB/s, median (all) | of the copy | CPU s | peak over the baseline, MB |",
        "|---|---|---|---|---|",
    ]
    names = dict.fromkeys(one.step for one in found)
    walls = {name: [one.wall_s for one in found if one.step == name] for name in names}
    for name in names:
        speeds = [size / 1e6 / wall for wall in walls[name]]
        shares = [copy / own for copy, own in zip(walls.get(f"copy before {name}", []), walls[name], strict=False)]
        share = f"{statistics.median(shares):.0%} ({', '.join(f'{one:.0%}' for one in shares)})" if shares else ""
        cpu = statistics.median(one.cpu_s for one in found if one.step == name)
        peak = max(one.peak_bytes for one in found if one.step == name) - idle.peak_bytes
        speed = f"{statistics.median(speeds):,.0f} ({', '.join(f'{one:,.0f}' for one in speeds)})"
        lines.append(f"| {name} | {speed} | {share} | {cpu:.1f} | {max(0, peak) / 1e6:,.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; with --write also into benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.folder) as name:
        folder = Path(name)
        size = make_folder(folder / "hub", flags.layers)
        idle = run("idle", ["-c", _IDLE])
        found = [one for number in range(flags.rounds) for one in measure(folder, number)]
    text = report(flags.layers, size, idle, found)
    print(text)
    if flags.write:
        path = ROOT / "benchmarks" / "results" / f"checkpoint_conversion-{datetime.date.today()}.md"
        path.write_text(f"# Import and export of checkpoints\n\n{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
