"""The files that a synthetic training leaves in its run directory, at every moment of the demonstration."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llmctl.watch.demo_machine import DemoMachine, GrowingFile

LOG_EVERY = 5
"""Iterations between two rows."""
VALID_EVERY = 250
BUILD_S = 12.0
"""Seconds for the kernels of a run that builds them."""
_PHASES = ((0.06, "data"), (0.82, "forward and backward"), (0.97, "optimizer"), (1.0, "logging"))


@dataclass(frozen=True)
class Attempt:
    """One attempt: its iterations, and how it ends.

    Attributes:
        begins: seconds since 1970 at which job.sh starts.
        first: the first iteration.
        last: the iteration at which the attempt ends or hangs.
        end: ``completed``, ``failed`` or ``hangs``.
        guilty: the rank that fails or hangs.
        builds: True if kernels are built first.
    """

    begins: float
    first: int
    last: int
    end: str = "completed"
    guilty: int = 0
    builds: bool = False


@dataclass(frozen=True)
class Training:
    """A synthetic training.

    Attributes:
        run_dir: path on the machine of the demonstration.
        hosts: the nodes.
        gpus_per_node: ranks of each node.
        train_iters: last iteration of the run.
        iteration_s: seconds of an iteration.
        tokens: tokens of a global batch.
        mfu: mean share of the device's peak.
        floor: loss that the training approaches.
        memory_gib: peak of a rank.
        attempts: in order.
    """

    run_dir: str
    hosts: tuple[str, ...]
    gpus_per_node: int
    train_iters: int
    iteration_s: float
    tokens: int
    mfu: float
    floor: float
    memory_gib: float
    attempts: tuple[Attempt, ...]

    def put_on(self, machine: DemoMachine) -> None:
        """Add the files of the run."""
        metrics = machine.files.setdefault(f"{self.run_dir}/metrics.jsonl", GrowingFile())
        for number, attempt in enumerate(self.attempts, 1):
            folder = f"{self.run_dir}/attempts/{number}"
            self._put_start_and_end(machine, folder, attempt)
            self._put_ranks(machine, folder, attempt)
            log = machine.files[f"{folder}/rank-00000.log"] = GrowingFile()
            log.add(attempt.begins + 2, f"{self._size} ranks on {len(self.hosts)} nodes\n".encode())
            if attempt.first > 1:
                log.add(attempt.begins + 4, f"resumed from the checkpoint of iteration {attempt.first - 1}\n".encode())
            for row in self._rows(number, attempt):
                metrics.add(row["time"], json.dumps(row).encode() + b"\n")
                log.add(row["time"], self._line(row).encode() + b"\n")
            self._put_error(machine, folder, attempt)

    @property
    def _size(self) -> int:
        return len(self.hosts) * self.gpus_per_node

    def host_of(self, rank: int) -> str:
        """The node of a rank."""
        return self.hosts[rank // self.gpus_per_node]

    def _train_begins(self, attempt: Attempt) -> float:
        return attempt.begins + (BUILD_S if attempt.builds else 5.0)

    def ends(self, attempt: Attempt) -> float:
        """Time at which the attempt stops making progress."""
        return self._train_begins(attempt) + (attempt.last - attempt.first + 1) * self.iteration_s

    def _rows(self, number: int, attempt: Attempt) -> Iterator[dict[str, Any]]:
        begin = self._train_begins(attempt)
        for iteration in range(attempt.first, attempt.last + 1):
            if iteration % LOG_EVERY:
                continue
            time = begin + (iteration - attempt.first + 1) * self.iteration_s
            noise, wave = _noise(iteration, self.floor), _noise(iteration, self.mfu)
            pace = 1 + 0.04 * wave - (0.3 if iteration % 400 == 0 else 0)
            yield {
                "attempt": number,
                "fencing_token": number,
                "iteration": iteration,
                "consumed_tokens": iteration * self.tokens,
                "lm_loss": self._loss(iteration) + 0.05 * noise,
                "grad_norm": 0.35 + 2.2 / (1 + iteration / 120) + 0.06 * wave + (1.1 if iteration % 735 == 0 else 0),
                "iteration_time_s": self.iteration_s / pace,
                "tokens_per_s": self.tokens / self.iteration_s * pace,
                "mfu": self.mfu * pace,
                "peak_memory_bytes": int((self.memory_gib + 0.4 * min(1.0, iteration / 900)) * (1 << 30)),
                "skipped_iterations": 0,
                "nan_iterations": 0,
                "time": time,
            }
            if iteration % VALID_EVERY == 0:
                valid = self._loss(iteration) + 0.07
                yield {
                    "attempt": number,
                    "fencing_token": number,
                    "iteration": iteration,
                    "valid_loss": valid,
                    "valid_ppl": math.exp(valid),
                    "time": time,
                }

    def _loss(self, iteration: int) -> float:
        return self.floor + (10.9 - self.floor) * math.pow(1 + iteration / 60, -0.85)

    def _line(self, row: dict[str, Any]) -> str:
        where = f"{row['iteration']}/{self.train_iters}"
        if "valid_loss" in row:
            return f"{where}  validation loss {row['valid_loss']:.4f}  perplexity {row['valid_ppl']:.2f}"
        parts = f"loss {row['lm_loss']:.4f}  grad {row['grad_norm']:.3f}  {row['tokens_per_s']:,.0f} tok/s"
        return f"{where}  {parts}  MFU {row['mfu']:.1%}"

    def _put_start_and_end(self, machine: DemoMachine, folder: str, attempt: Attempt) -> None:
        started = {"submission": 1, "job_id": "1", "host": self.hosts[0], "pid": 1, "time": attempt.begins}
        hosts = "".join(f"{host} slots={self.gpus_per_node}\n" for host in self.hosts)
        _put(machine, f"{folder}/started.json", attempt.begins, started)
        machine.files[f"{folder}/hostfile"] = GrowingFile()
        machine.files[f"{folder}/hostfile"].add(attempt.begins, hosts.encode())
        ended = self.ends(attempt) + 3
        if attempt.end == "completed":
            outcome = {"reason": "completed", "iteration": attempt.last, "time": ended - 1}
            _put(machine, f"{folder}/outcome.json", ended - 1, outcome)
        if attempt.end != "hangs":
            code = 0 if attempt.end == "completed" else 1
            _put(machine, f"{folder}/exit.json", ended, {"code": code, "reason": attempt.end, "time": ended})

    def _put_ranks(self, machine: DemoMachine, folder: str, attempt: Attempt) -> None:
        for rank in range(self._size):
            machine.files[f"{folder}/heartbeat/rank-{rank:05d}.json"] = GrowingFile(
                content=self._heartbeat(attempt, rank)
            )

    def _heartbeat(self, attempt: Attempt, rank: int) -> Callable[[float], bytes | None]:
        begin, end = self._train_begins(attempt), self.ends(attempt)

        def at(now: float) -> bytes | None:
            if now < attempt.begins + 1:
                return None
            time = min(now - 0.1 * _share(rank, 3.7), end)
            if time < begin:
                iteration, phase = 0, "start"
                if attempt.builds:
                    done = int(100 * (now - attempt.begins) / BUILD_S)
                    phase = (
                        f"building the kernels {done}%" if rank % self.gpus_per_node == 0 else "building the kernels"
                    )
            elif now >= end:
                iteration, phase = attempt.last, "optimizer"
                if attempt.end == "hangs" and rank == attempt.guilty:
                    phase, time = "forward and backward", end - 1
            else:
                steps = (time - begin) / self.iteration_s
                iteration, part = attempt.first + int(steps), steps % 1
                phase = next(name for share, name in _PHASES if part < share)
            return json.dumps(
                {
                    "rank": rank,
                    "host": self.host_of(rank),
                    "pid": 1,
                    "iteration": iteration,
                    "phase": phase,
                    "time": time,
                }
            ).encode()

        return at

    def _put_error(self, machine: DemoMachine, folder: str, attempt: Attempt) -> None:
        if attempt.end != "failed":
            return
        time = self.ends(attempt)
        for rank in (attempt.guilty, (attempt.guilty + 1) % self._size):
            is_cause = rank == attempt.guilty
            message = (
                "CUDA error: uncorrectable ECC error encountered"
                if is_cause
                else "Connection closed by peer [10.0.0.7]"
            )
            written = time + (0 if is_cause else 1)
            error = {
                "rank": rank,
                "coordinates": f"rank {rank} (pp 0, dp {rank // 2}, tp {rank % 2})",
                "host": self.host_of(rank),
                "iteration": attempt.last,
                "type": "AcceleratorError" if is_cause else "RuntimeError",
                "module": "torch",
                "message": message,
                "traceback": "",
                "consequence": not is_cause,
                "time": written,
            }
            _put(machine, f"{folder}/errors/rank-{rank:05d}.json", written, error)
        log = machine.files.setdefault(f"{folder}/rank-{attempt.guilty:05d}.log", GrowingFile())
        log.add(
            time,
            b"Traceback (most recent call last):\n"
            b'  File "trainer/training/loop.py", line 164, in run\n'
            b"    self._step()\n"
            b"torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n",
        )


def _put(machine: DemoMachine, path: str, time: float, values: dict[str, Any]) -> None:
    machine.files[path] = GrowingFile()
    machine.files[path].add(time, json.dumps(values).encode())


def _noise(iteration: int, seed: float) -> float:
    """A number from -1 to 1, always the same one for an iteration."""
    return 2 * _share(iteration, seed) - 1


def _share(number: int, seed: float) -> float:
    return math.modf(abs(math.sin(number * 12.9898 + seed) * 43758.5453))[0]
