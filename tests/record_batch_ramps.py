"""Record the batch sizes of Megatron-LM's --rampup-batch-size: ``python -m tests.record_batch_ramps CALCULATOR``.

CALCULATOR is megatron/core/num_microbatches_calculator.py of release 0.15 of Megatron-LM or an earlier one; the file
imports nothing else of it. The numbers of iterations follow update_train_iters of megatron/training/training.py there.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "recorded" / "batch_ramps.jsonl"
CASES = 150


def recorded(calculator: Any, draw: random.Random) -> dict[str, Any]:
    """One random ramp: its numbers, the sizes with the iterations of each, and iterations of runs by their samples."""
    start, increment = draw.randint(1, 40), draw.randint(1, 20)
    full = start + increment * draw.randint(1, 30)
    samples = draw.randint(1, draw.choice([10, 1000, 20000]))
    ramp = calculator(full, 1, 1, False, 1, start, increment, samples)
    sizes: list[int] = []
    while sum(sizes) <= samples + 3 * full:
        ramp.update(sum(sizes), False)
        sizes.append(ramp.current_global_batch_size)
    lengths = [samples, sum(sizes), *(draw.randint(1, 2 * samples + 3 * full) for _ in range(4))]
    return {
        "ramp": [start, increment, samples],
        "full": full,
        "sizes": [[size, len(list(each))] for size, each in groupby(sizes)],
        "iterations": [[length, _iterations(ramp, length)] for length in lengths],
    }


def _iterations(ramp: Any, samples: int) -> int:
    iterations = consumed = 0
    while consumed <= min(ramp.ramup_samples, samples):
        ramp.update(consumed, False)
        consumed += ramp.current_global_batch_size
        iterations += 1
    return iterations + max(0, samples - consumed) // ramp.global_batch_size


def main(path: str) -> None:
    """Write the record."""
    calculator, draw = runpy.run_path(path)["RampupBatchsizeNumMicroBatchesCalculator"], random.Random(20)
    RECORD.write_text("".join(json.dumps(recorded(calculator, draw)) + "\n" for _ in range(CASES)))


if __name__ == "__main__":
    main(sys.argv[1])
