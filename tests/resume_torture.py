"""Kill a two-rank training run at random instants, resume it, and compare every bit.

One command: ``python -m tests.resume_torture --seeds 20``. Each seed draws a layout, synchronous or asynchronous saves
for each attempt, and one to three interruptions: SIGKILL to all ranks after some step, while a checkpoint is written,
or right when the checkpoint is renamed; or SIGTERM to one rank, after which the run must save and exit by itself. The
run is then resumed to its end. Its metrics except the times, and its last checkpoint byte for byte, must equal those of
an uninterrupted run with synchronous saves.
"""

import argparse
import hashlib
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.rank_server import rank_context
from trainer.checkpoint.directory import LATEST, checkpoint_path, complete_iterations, damage, find_latest
from trainer.checkpoint.metadata import load_metadata
from trainer.checkpoint.resume import OTHER_KERNELS

TRAIN_ITERS = 20
DEADLINE_S = 240.0
# Polls at this interval find a checkpoint while it is written.
WRITE_S = 0.001

# Fields that may differ between two runs of the same computation.
MEASURED = {
    *("attempt", "fencing_token", "time", "iteration_time_s", "tokens_per_s", "tflops_per_device", "mfu"),
    "peak_memory_bytes",
}

BASE = {
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 250,
        "make_vocab_size_divisible_by": 8,
    },
    "training": {
        "train_iters": TRAIN_ITERS,
        "seq_length": 32,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "eval_interval": 7,
        "eval_iters": 1,
    },
    "optimizer": {"lr": 1e-3, "lr_warmup_iters": 3, "lr_decay_style": "cosine", "min_lr": 1e-4},
    "data": {"mock_data": True},
    "checkpoint": {"save_interval": 2, "keep_last": 2},
    "parallel": {"distributed_timeout_minutes": 2.0},
}
VARIANTS = {
    "tp2": {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    # A window this short makes the loss scale move; logging every third step leaves sums between checkpoints.
    "dp2 fp16": {
        "training": {"fp16": True, "initial_loss_scale": 2.0**24, "loss_scale_window": 4, "hysteresis": 1},
        "logging": {"log_interval": 3},
    },
    "pp2": {"parallel": {"pipeline_model_parallel_size": 2}},
    "zero1 bf16, bf16 moments, remainders": {
        "training": {"bf16": True},
        "optimizer": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "store_param_remainders": True},
        "parallel": {"use_distributed_optimizer": True},
    },
    "zero3 fp16": {
        "training": {"fp16": True, "initial_loss_scale": 2.0**24, "loss_scale_window": 4, "hysteresis": 1},
        "parallel": {"data_parallel_sharding_strategy": "optim_grads_params"},
    },
}
KINDS = ("step", "write", "write", "rename", "rename", "term")


def config_of(variant, is_async=False):
    """The config of a variant as plain values; with ``is_async`` checkpoints are written beside the next iterations."""
    changes = {**VARIANTS[variant], "checkpoint": {"async_save": is_async}}
    return {section: {**BASE.get(section, {}), **changes.get(section, {})} for section in BASE.keys() | changes.keys()}


def free_port():
    """A free port, chosen by the kernel."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def build_kernels():
    """Build the kernels, if they are missing.

    An attempt waits for them for a limited time, and then trains on torch's operations, which round otherwise. On a
    busy machine one attempt would give up, and the next would find them.
    """
    builder = rank_context().Process(target=_build)
    builder.start()
    # Without a compiler the build fails, and all attempts train on torch's operations.
    builder.join()


def _build():
    from trainer.__main__ import main

    sys.exit(main(["kernels", "build"]))


def run_rank(run, number, rank, port):
    """Run one rank, like ``python -m trainer pretrain`` in a separate process."""
    from trainer.__main__ import main

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LLMCTL_RUN_DIR": str(run),
        "LLMCTL_ATTEMPT": str(number),
    }
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.exit(main(["pretrain", "--config", str(run / "config.yaml")]))


class Attempt:
    """Two ranks of one attempt. A context manager that kills the ranks at its end."""

    def __init__(self, run, number):
        self.run = run
        self.number = number
        port = free_port()
        self.ranks = [rank_context().Process(target=run_rank, args=(run, number, rank, port)) for rank in range(2)]
        for rank in self.ranks:
            rank.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    @property
    def is_over(self):
        """True if any rank has ended."""
        return any(rank.exitcode is not None for rank in self.ranks)

    def kill(self):
        """Send SIGKILL to all ranks."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join(timeout=DEADLINE_S)

    def finish(self):
        """Wait for a regular end; returns its reason."""
        end = time.monotonic() + DEADLINE_S
        for rank in self.ranks:
            rank.join(timeout=max(1.0, end - time.monotonic()))
        codes = [rank.exitcode for rank in self.ranks]
        assert codes == [0, 0], f"exit codes {codes} in {self.run}:\n{self.logs()}"
        return json.loads((self.run / "attempts" / str(self.number) / "outcome.json").read_text())["reason"]

    def logs(self):
        """Output of the ranks."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-2000:]}"
            for path in sorted((self.run / "attempts" / str(self.number)).glob("rank-*.log"))
        )


def wait_until(attempt, condition, pause_s=0.005):
    """True if ``condition()`` became true before the attempt ended.

    ``pause_s``: pause between two polls; a poll itself takes time.
    """
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if condition():
            return True
        if attempt.is_over:
            return False
        time.sleep(pause_s)
    raise AssertionError(f"nothing happened for {DEADLINE_S} s in {attempt.run}:\n{attempt.logs()}")


def pointer(run):
    """The iteration that the latest-pointer names, 0 without one."""
    try:
        return int((run / "checkpoints" / LATEST).read_text())
    except OSError:
        return 0


def rows(run):
    """Last row per iteration and kind, without measured times."""
    kept = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "save_bytes" in row:
            continue
        kept[row["iteration"], "valid_loss" in row] = {key: row[key] for key in row if key not in MEASURED}
    return kept


def stopped_iterations(run):
    """Iterations at which an attempt was stopped in order."""
    outcomes = [json.loads(path.read_text()) for path in run.glob("attempts/*/outcome.json")]
    return {outcome["iteration"] for outcome in outcomes if outcome["reason"] == "stopped"}


def last_checkpoint(run):
    """Hash of every tensor file of the last checkpoint."""
    folder = checkpoint_path(run / "checkpoints", TRAIN_ITERS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def last_kernels(run):
    """The kernels of the last checkpoint; raises AssertionError if an attempt had others than the one before.

    The kernels depend on the machine. With others a resumed run rounds otherwise, which the resume does not cause.
    """
    for path in sorted(run.glob("attempts/*/rank-00000.log")):
        changed = [line for line in path.read_text().splitlines() if line.startswith(OTHER_KERNELS)]
        assert not changed, f"{path.parent}: {changed[0]}"
    return load_metadata(checkpoint_path(run / "checkpoints", TRAIN_ITERS)).kernels


@dataclass
class Torture:
    """Run the seeds, with one uninterrupted run per variant for comparison."""

    folder: Path
    landed: Counter = field(default_factory=Counter)
    saves: Counter = field(default_factory=Counter)
    references: dict = field(default_factory=dict)

    def reference(self, variant):
        """Kernels, metrics and checkpoint of the uninterrupted run."""
        if not self.references:
            build_kernels()
        if variant not in self.references:
            run = self.start(f"reference {variant}", variant)
            with Attempt(run, 1) as attempt:
                assert attempt.finish() == "completed"
            self.references[variant] = last_kernels(run), rows(run), last_checkpoint(run)
        return self.references[variant]

    def start(self, name, variant):
        """A fresh run directory."""
        run = self.folder / name.replace(" ", "-")
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(json.dumps(config_of(variant)))
        return run

    def choose_saves(self, run, variant, is_async):
        """Write the config of the next attempt."""
        self.saves[is_async] += 1
        (run / "config.yaml").write_text(json.dumps(config_of(variant, is_async)))

    def run_seed(self, seed):
        """Interrupt, resume, compare; raises AssertionError on any difference."""
        draw, draw_way = random.Random(seed), random.Random(f"{seed} saves")
        variant = list(VARIANTS)[seed % len(VARIANTS)]
        kernels, metrics, tensors = self.reference(variant)
        run = self.start(f"seed {seed}", variant)
        number = 0
        for _ in range(draw.randint(1, 3)):
            number += 1
            self.choose_saves(run, variant, is_async=draw_way.random() < 0.5)
            with Attempt(run, number) as attempt:
                self.interrupt(attempt, draw)
            self.check_checkpoints(run)
        self.choose_saves(run, variant, is_async=draw_way.random() < 0.5)
        with Attempt(run, number + 1) as attempt:
            assert attempt.finish() == "completed"
        used = last_kernels(run)
        assert used == kernels, f"seed {seed} ({variant}): kernels {used} instead of {kernels}"
        found = rows(run)
        # A stopped attempt logs its last iteration, also within an interval.
        extra = found.keys() - metrics.keys() - {(iteration, False) for iteration in stopped_iterations(run)}
        assert not extra, f"seed {seed}: other iterations logged: {sorted(extra)}"
        for key, row in metrics.items():
            assert found.get(key) == row, f"seed {seed} ({variant}): {found.get(key)} instead of {row}"
        assert last_checkpoint(run) == tensors, f"seed {seed} ({variant}): the last checkpoint differs"

    def interrupt(self, attempt, draw):
        """One interruption at a random instant."""
        checkpoints = attempt.run / "checkpoints"
        before = pointer(attempt.run)
        kind = draw.choice(KINDS)
        wait_s = draw.uniform(0.0, 0.01 if kind != "step" else 0.3)
        target = before + draw.randint(1, 8)
        if kind == "step":  # at once, while the ranks start, if an earlier attempt reached the target
            happened = wait_until(attempt, lambda: last_row(attempt.run)["iteration"] >= target)
        elif kind == "term":  # only a rank that trains saves after SIGTERM
            happened = wait_until(attempt, lambda: last_row(attempt.run)["attempt"] == attempt.number)
        elif kind == "write":
            happened = wait_until(
                attempt, lambda: any(name.startswith(".iter_") for name in names(checkpoints, target)), WRITE_S
            )
        else:
            wait_s /= 20  # the pointer is written a millisecond or two after the rename
            happened = wait_until(
                attempt, lambda: any(name.startswith("iter_") for name in names(checkpoints, target)), WRITE_S / 3
            )
        if not happened:
            assert attempt.finish() == "completed"
            self.landed["after the end"] += 1
            return
        time.sleep(wait_s)
        if kind == "term":
            attempt.ranks[draw.randint(0, 1)].terminate()
            self.landed[f"SIGTERM: {attempt.finish()}"] += 1
            return
        attempt.kill()
        complete = complete_iterations(checkpoints)
        if any(".tmp-" in entry.name for entry in checkpoints.iterdir()):
            self.landed["inside a checkpoint's write"] += 1
        elif complete and complete[-1] > pointer(attempt.run):
            self.landed["between rename and pointer"] += 1
        elif any(entry.name.startswith(".") for entry in checkpoints.iterdir()):
            self.landed["inside pointer or clean-up"] += 1
        else:
            self.landed["elsewhere"] += 1
        assert pointer(attempt.run) >= before, "the pointer went back"

    @staticmethod
    def check_checkpoints(run):
        """Require every checkpoint under a final name to be complete, and the latest to be found."""
        root = run / "checkpoints"
        for iteration in complete_iterations(root):
            assert damage(checkpoint_path(root, iteration)) is None
        latest, _ = find_latest(root)
        assert (latest is not None) == bool(complete_iterations(root))
        assert pointer(run) == 0 or latest == checkpoint_path(root, pointer(run))


def names(folder, target):
    """Names in a checkpoint folder that belong to an iteration from ``target`` on."""
    try:
        entries = [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
    return [name for name in entries if "iter_" in name and int(name.split("iter_")[1][:7]) >= target]


def last_row(run):
    """Last row of metrics.jsonl; iteration and attempt 0 without a row."""
    try:
        content = (run / "metrics.jsonl").read_bytes()
    except OSError:
        content = b""
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    return json.loads(lines[-1]) if lines else {"iteration": 0, "attempt": 0}


def main():
    """Run the seeds of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="resume-torture-") as folder:
        torture = Torture(Path(folder))
        for seed in range(options.first, options.first + options.seeds):
            began = time.monotonic()
            torture.run_seed(seed)
            print(f"seed {seed}: equal bit for bit ({time.monotonic() - began:.0f} s)", flush=True)
        print(f"{options.seeds} seeds equal; interruptions by place:  {dict(torture.landed)}")
        print(f"attempts with asynchronous saves: {torture.saves[True]} of {torture.saves.total()}")


if __name__ == "__main__":
    main()
