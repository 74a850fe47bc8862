"""Step times of the pipeline schedules, compared with the ideal of their tables.

    python -m benchmarks.pipeline_efficiency --write

There are two kinds of stages. On four ranks the stages sleep: two cores are enough, and everything but the computation
is real. On two ranks the stages train a small model, with one thread each. The ideal of a table is its timeline with
the durations of the actions: the requested sleep times, or the measured duration of each action in the same step. A
schedule's factor is the step time of 1F1B divided by its own step time, as measured and as predicted by the ideals.

Schedules take turns, so that other load affects all of them. The table shows the median and the best of all rounds, and
if the median is within 5% of the ideal. The exit code is 1 if a schedule is not within 5%. All times are by the
machine's monotonic clock, from the first start to the last end.
"""

import argparse
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.trainer.spawn import Ranks
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.parallel_model import build_model
from trainer.pipeline import executor
from trainer.pipeline.communication import PipelinePeers
from trainer.planning.build_config import build_config
from trainer.planning.schedule import (
    SCHEDULE_KINDS,
    Action,
    ActionKind,
    PipelineSchedule,
    build_schedule,
    default_chunks,
    message_count,
    timeline,
)

TIMEOUT = timedelta(seconds=300)
RESULTS = Path(__file__).parent / "results"
MOST = 1.05
"""Allowed ratio of the median step time to the ideal."""
Span = tuple[Action, float, float]
"""An action with its start and end, in seconds of the monotonic clock."""


@dataclass(frozen=True)
class Step:
    """One step of a schedule as measured by the ranks."""

    schedule: PipelineSchedule
    rows: list[list[Span]]
    messages: int
    nominal: dict[ActionKind, float] | None = None
    """Requested durations of the actions."""

    @property
    def seconds(self) -> float:
        """Time from the first start to the last end."""
        return max(row[-1][2] for row in self.rows) - min(row[0][1] for row in self.rows)

    @property
    def ideal(self) -> float:
        """Step time of the table with the measured durations of the actions."""
        seen = [{action: end - start for action, start, end in row} for row in self.rows]
        return timeline(self.schedule, lambda rank, action: seen[rank][action]).step_time

    @property
    def nominal_ideal(self) -> float:
        """Step time of the table with the requested durations of the actions."""
        assert self.nominal is not None
        return timeline(self.schedule, self.nominal).step_time


def timed(
    perform: Callable[[Action, Tensor | None], Tensor | None], spans: list[Span]
) -> Callable[[Action, Tensor | None], Tensor | None]:
    def run(action: Action, incoming: Tensor | None) -> Tensor | None:
        start = time.monotonic()
        outgoing = perform(action, incoming)
        spans.append((action, start, time.monotonic()))
        return outgoing

    return run


class SendCounter:
    """Context manager that counts the messages sent by this process."""

    def __enter__(self) -> "SendCounter":
        self.count = 0
        self._real = dist.isend

        def counting(*arguments: object) -> object:
            self.count += 1
            return self._real(*arguments)

        dist.isend = counting
        return self

    def __exit__(self, *_: object) -> None:
        dist.isend = self._real


def sleep_through(rank: int, pp: int, kind: str, count: int, unit_s: float) -> tuple[list[Span], int]:
    """Run this rank's row with sleeping actions.

    A whole stage's forward and half of its backward take ``unit_s`` each.
    """
    schedule = build_schedule(kind, pp, default_chunks(kind), count)
    durations = sleeping_durations(kind, unit_s)
    groups = build_process_groups(ParallelMesh(tp=1, pp=pp, dp=1, rank=rank), TIMEOUT)
    assert groups.pp is not None
    assert groups.pp_up is not None
    shapes = [(64, 1, 64)] * count
    peers = PipelinePeers(groups.pp, groups.pp_up, tuple(range(pp)), shapes, torch.float32, torch.device("cpu"))
    output = torch.ones(shapes[0])

    late = lateness()

    def perform(action: Action, _incoming: Tensor | None) -> Tensor:
        time.sleep(max(durations[action.kind] - late, 0.0))
        return output

    spans: list[Span] = []
    dist.barrier()
    with SendCounter() as sends:
        executor.run_row(schedule, rank, peers, timed(perform, spans))
    return spans, sends.count


def lateness() -> float:
    """Minimum delay of a wake-up in seconds, by which stages sleep less."""
    asked, seen = 0.005, []
    for _ in range(8):
        start = time.monotonic()
        time.sleep(asked)
        seen.append(time.monotonic() - start)
    return min(seen) - asked


def sleeping_durations(kind: str, unit_s: float) -> dict[ActionKind, float]:
    """Seconds of each action, divided by the number of model chunks per rank."""
    part = unit_s / default_chunks(kind)
    return {
        ActionKind.FORWARD: part,
        ActionKind.BACKWARD_INPUT: part,
        ActionKind.BACKWARD_WEIGHT: part,
        ActionKind.BACKWARD: 2 * part,
    }


def sleeping_step(ranks: Ranks, pp: int, kind: str, count: int, unit_s: float) -> Step:
    """One step of sleeping stages."""
    results = ranks.run(sleep_through, kind, count, unit_s, world_size=pp)
    schedule = build_schedule(kind, pp, default_chunks(kind), count)
    rows = [spans for spans, _ in results]
    return Step(schedule, rows, sum(sends for _, sends in results), sleeping_durations(kind, unit_s))


def compute_through(rank: int, pp: int, kind: str, count: int, rounds: int) -> list[tuple[list[Span], int]]:
    """Run this rank's row with a small model, ``rounds`` times after a warm-up."""
    config = build_config(
        {
            "model": {
                "num_layers": 8,
                "hidden_size": 256,
                "num_attention_heads": 8,
                "position_embedding_type": "rope",
                "normalization": "RMSNorm",
                "swiglu": True,
                "disable_bias_linear": True,
                "untie_embeddings_and_output_weights": True,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
            },
            "parallel": {
                "pipeline_model_parallel_size": pp,
                "pipeline_schedule": kind,
                "num_virtual_stages_per_pipeline_rank": default_chunks(kind) if kind == "interleaved" else None,
            },
            "training": {
                "train_iters": 1,
                "seq_length": 128,
                "micro_batch_size": 2,
                "global_batch_size": 2 * count,
                "device": "cpu",
            },
            "optimizer": {"optimizer": "sgd", "lr": 0.1},
            "data": {"mock_data": True},
        }
    )
    mesh = ParallelMesh.build(config, rank, pp)
    model = build_model(config, 1000, mesh, build_process_groups(mesh, TIMEOUT), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(0, 1000, (count, 2, 129), generator=generator)
    batch = [MicroBatch(tokens=window[:, :-1], labels=window[:, 1:], index=i) for i, window in enumerate(windows)]
    results = []
    for _ in range(rounds + 1):
        spans: list[Span] = []
        step = executor.TrainingStep(model, batch, torch.ones(()), 0.0, StepRandomness(seed=1, iteration=0))
        step.perform = timed(step.perform, spans)  # type: ignore[method-assign]
        model.gradients.begin(count)
        dist.barrier()
        with SendCounter() as sends:
            step.run(build_schedule(kind, pp, default_chunks(kind), count))
        model.gradients.finish()
        results.append((spans, sends.count))
    return results[1:]


def computing_steps(ranks: Ranks, pp: int, kind: str, count: int, rounds: int) -> list[Step]:
    """Steps of stages that train a small model."""
    schedule = build_schedule(kind, pp, default_chunks(kind), count)
    by_rank = ranks.run(compute_through, kind, count, rounds, world_size=pp)
    return [
        Step(schedule, [spans for spans, _ in results], sum(sends for _, sends in results))
        for results in zip(*by_rank, strict=True)
    ]


def median_ratio(steps: list[Step], ideal: Callable[[Step], float]) -> float:
    """Median ratio of step time to ideal."""
    return statistics.median(step.seconds / ideal(step) for step in steps)


def verdict(stages: str, steps: dict[str, list[Step]], ideal: Callable[[Step], float]) -> list[str]:
    """Messages on schedules that exceed the allowed ratio."""
    ratios = {kind: median_ratio(of_kind, ideal) for kind, of_kind in steps.items()}
    return [f"{kind} of stages that {stages}: {ratio:.3f}" for kind, ratio in ratios.items() if ratio > MOST]


def table_of(steps: dict[str, list[Step]], ideal: Callable[[Step], float]) -> list[str]:
    """One line per schedule."""

    def median(kind: str, value: Callable[[Step], float]) -> float:
        return statistics.median(map(value, steps[kind]))

    lines = [
        "| schedule | step, ms | ideal, ms | step / ideal, median | within 5% | best | with measured durations "
        "| messages (table) | speedup over 1F1B | predicted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, of_kind in steps.items():
        ratios = [step.seconds / ideal(step) for step in of_kind]
        is_within = "yes" if median_ratio(of_kind, ideal) <= MOST else "no"
        counts = {step.messages for step in of_kind}
        lines.append(
            f"| {kind} | {1e3 * median(kind, lambda step: step.seconds):.0f} | {1e3 * median(kind, ideal):.0f} "
            f"| {median_ratio(of_kind, ideal):.3f} | {is_within} "
            f"| {min(ratios):.3f} | {median_ratio(of_kind, lambda step: step.ideal):.3f} "
            f"| {', '.join(map(str, counts))} ({message_count(of_kind[0].schedule)}) "
            f"| {median('1f1b', lambda step: step.seconds) / median(kind, lambda step: step.seconds):.3f} "
            f"| {median('1f1b', ideal) / median(kind, ideal):.3f} |"
        )
    return lines


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.05, help="seconds of a sleeping stage's forward")
    parser.add_argument("--write", action="store_true", help=f"also write the table to benchmarks/{RESULTS.name}")
    options = parser.parse_args()
    count = options.micro_batches
    with Ranks(4) as ranks:
        sleeping: dict[str, list[Step]] = {kind: [] for kind in SCHEDULE_KINDS}
        computing: dict[str, list[Step]] = {kind: [] for kind in SCHEDULE_KINDS}
        for _ in range(options.rounds):
            for kind in SCHEDULE_KINDS:
                sleeping[kind].append(sleeping_step(ranks, 4, kind, count, options.unit))
        for _ in range(options.rounds):
            for kind in SCHEDULE_KINDS:
                computing[kind] += computing_steps(ranks, 2, kind, count, 2)
    missed = [
        *verdict("sleep", sleeping, lambda step: step.nominal_ideal),
        *verdict("compute", computing, lambda step: step.ideal),
    ]
    text = "\n".join(
        [
            f"# Pipeline schedules compared with their ideal, {datetime.date.today()}",
            "",
            f"{platform.processor() or platform.machine()}, gloo, torch {torch.__version__}; {count} micro-batches, "
            f"{options.rounds} rounds; `python -m benchmarks.pipeline_efficiency`.",
            "",
            f"Four ranks, stages sleep {1e3 * options.unit:.0f} ms forward and twice that backward; the ideal uses "
            "the requested durations:",
            "",
            *table_of(sleeping, lambda step: step.nominal_ideal),
            "",
            "Two ranks that compute, one thread each (8 layers of 256, sequence 128); the ideal is that of the "
            "measured durations:",
            "",
            *table_of(computing, lambda step: step.ideal),
            "",
            f"More than {MOST - 1:.0%} above the ideal: {'; '.join(missed) or 'none'}.",
            "",
        ]
    )
    print(text)
    if options.write:
        (RESULTS / f"pipeline_efficiency-{datetime.date.today()}.md").write_text(text, encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
