"""The page of predicted and measured CPU layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.cpu_layouts.records import CPU, JudgedLayout, Records, judged
from trainer.planning.estimate.devices import GIB

PAGE = """# CPU layouts beside their predictions

`python -m benchmarks.cpu_layouts RECORDS --measure` trains small models in COUNT layouts on 1, 2 and 4 ranks of one
machine, up to ROUNDS times in turns, and `python -m benchmarks.cpu_layouts RECORDS --to PAGE` makes this page of
`cpu_layouts.jsonl`. float32, gloo, one thread a rank, and the allocator's settings of a job of llmctl. Errors are
predicted by measured, less 1.

WHERE

- Memory is the peak of a rank's resident bytes, of the fullest rank of each pipeline rank, beside all that is
  predicted. A process that trains next to nothing is a large part of it. *Without the process* takes the peak of such a
  run on as many ranks from the measured one, and runtime and communicators from the predicted one: what is left are
  tensors and the allocator.
- Speeds are those of the trainer's speed test (`llmctl env bench`) with as many ranks, as `llmctl plan` takes them; of
  several tests the highest of each measurement. Nothing else was fitted. That the highest count, and CPU seconds, was
  decided in view of the results: the first tests, on the machine at its busiest, found half these speeds, with which
  CPU seconds were predicted 85% too long in the median. Eight later tests ran after the layouts.
- The machine had other work: more threads wanted to run than it has cores. Then the clock tells nothing about trainer
  or planner. CPU seconds do: those of a rank of the busiest pipeline rank, beside the predicted step without its
  waiting for other stages. A rank's CPU does not wait for messages, but sends and receives them.
- The planner counts a core for each rank. 4 ranks on CORES cores share them. They are predicted with the speeds of
  CORES ranks, and their time by the clock says nothing.
- Where memory is missed, tensors are not. By malloc's own count (mallinfo2, each millisecond) ZeRO-2 and 3, recompute
  and unfused attention held within 8% of the bytes that are predicted for tensors. Their processes are larger by
  blocks that glibc has freed and keeps, of which the planner counts 5% of the activations. With glibc's defaults ZeRO-3
  took as much. Its larger rank grew on, from 0.93 GiB after 5 steps to 1.10 after 100, later than the peaks here,
  while the bytes in use stayed as they were; dp 2 stayed within 0.01. ZeRO-2 and 3 load 0.06 GiB of modules.
- The planner's 0.001 GiB for each communicator are from these runs: so much more than one alone took a process of two
  or four ranks that trains next to nothing. With the 0.02 GiB of before, the median error of memory was 5.8%.

"""


def page_of(records: Records) -> str:
    """The whole page."""
    rows = judged(records)
    runs = [run for own in records.runs.values() for run in own]
    loads, spec = [run["load"] for run in runs], next(iter(records.speeds.values()))[0]
    where = f"{spec['date'][:10]}, {records.machine['processor']}, torch {spec['torch']}; load average "
    where += f"{min(loads):.1f} to {max(loads):.1f}."
    values = {
        "COUNT": len(rows),
        "ROUNDS": 1 + max(run["round"] for run in runs),
        "WHERE": where,
        "CORES": records.machine["cores"],
    }
    head = PAGE
    for name, value in values.items():
        head = head.replace(name, str(value))
    parts = [*summary_lines(rows), "", "## Layouts", "", *row_lines(rows), "", "## Speeds", "", *speed_lines(records)]
    return head + "\n".join(parts) + "\n"


def summary_lines(rows: Sequence[JudgedLayout]) -> Iterator[str]:
    """A table with a line for each number of ranks."""
    yield (
        "| ranks | layouts | memory: median error | bias | largest | without the process: median error | bias "
        "| CPU s: median error | bias | within 10% | time by the clock: median error | bias |"
    )
    yield "|---" * 12 + "|"
    for name, counts in (("1", (1,)), ("2", (2,)), ("4", (4,)), ("1 and 2", (1, 2)), ("all", (1, 2, 4))):
        own = [row for row in rows if row.layout.ranks in counts]
        if not own:
            continue
        memory, processor = [row.memory_error for row in own], [row.cpu_error for row in own]
        cells = [name, str(len(own)), *_middle(memory), f"{100 * max(map(abs, memory)):.1f}%"]
        cells += [*_middle([row.tensor_error for row in own]), *_middle(processor)]
        cells.append(str(sum(abs(error) <= 0.1 for error in processor)))
        cells += _middle([row.time_error for row in own]) if 4 not in counts else ["", ""]
        yield f"| {' | '.join(cells)} |"


def _middle(errors: Sequence[float]) -> tuple[str, str]:
    return f"{100 * median(map(abs, errors)):.1f}%", f"{100 * median(errors):+.1f}%"


def row_lines(rows: Sequence[JudgedLayout]) -> Iterator[str]:
    """A table with a line for each layout."""
    yield (
        "| ranks | model | layout | GiB of each pipeline rank | predicted | error | without the process "
        "| CPU s of a step | predicted | error | by the clock | predicted | error |"
    )
    yield "|---" * 13 + "|"
    for row in rows:
        yield (
            f"| {row.layout.ranks} | {row.layout.model} | {row.layout.name} | {memory_cells(row)} "
            f"| {100 * row.tensor_error:+.1f}% | {row.measured_cpu_s:.2f} | {row.predicted_cpu_s:.2f} "
            f"| {100 * row.cpu_error:+.0f}% | {row.measured_s:.2f} | {row.predicted_s:.2f} "
            f"| {100 * row.time_error:+.0f}% |"
        )


def memory_cells(row: JudgedLayout) -> str:
    """Measured and predicted memory, and the error."""
    measured = ", ".join(f"{peak / GIB:.3f}" for peak, _ in row.peaks)
    predicted = ", ".join(f"{memory.total / GIB:.3f}" for _, memory in row.peaks)
    return f"{measured} | {predicted} | {100 * row.memory_error:+.1f}%"


def speed_lines(records: Records) -> Iterator[str]:
    """A table of speeds, and of processes."""
    yield "| ranks | tests | GFLOP/s of large products | of attention | GB/s | between ranks | a process, GiB |"
    yield "|---" * 7 + "|"
    for ranks, documents in sorted(records.speeds.items()):
        device = records.device(ranks)
        speeds = [device.product_share * CPU.single / 1e9, device.attention_share * CPU.single / 1e9]
        speeds += [device.bandwidth / 1e9, device.within / 1e9 if ranks > 1 else 0.0]
        shown = [f"{speed:.1f}" for speed in speeds]
        yield f"| {ranks} | {len(documents)} | {' | '.join(shown)} | {records.process(ranks) / GIB:.3f} |"
