"""Predicted memory and time of CPU layouts beside measured ones.

    python -m benchmarks.cpu_layouts --measure RECORDS [--rounds 2]
    python -m benchmarks.cpu_layouts RECORDS [--to PAGE]

``--measure`` trains all layouts in turns and adds lines of JSON to a file; it takes half an hour on two cores. Without
it, predicts what the file has, and prints the errors.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.cpu_layouts.layouts import LAYOUTS, PROCESSES
from benchmarks.cpu_layouts.measure import MeasurementError, speed_test, train
from benchmarks.cpu_layouts.page import page_of, summary_lines
from benchmarks.cpu_layouts.records import judged, read_records
from benchmarks.train_speed import processor

SPEED_TESTS = 3
"""Speed tests of as many ranks, before their layouts, if each rank has a core."""


def main() -> int:
    """Measure, or print the errors; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="file of measurements, lines of JSON")
    parser.add_argument("--measure", action="store_true", help="measure, and add to the file")
    parser.add_argument("--rounds", type=int, default=2, help="with --measure: times to run each layout")
    parser.add_argument("--to", type=Path, help="write this page")
    options = parser.parse_args()
    if options.measure:
        _add(options.records, {"kind": "machine", "processor": processor(), "cores": os.cpu_count()})
        return sum(measure_round(options.records, number) for number in range(options.rounds)) and 1
    records = read_records(options.records)
    print("\n".join(summary_lines(judged(records))))
    if options.to is not None:
        options.to.write_text(page_of(records), encoding="utf-8")
    return 0


def measure_round(path: Path, number: int) -> int:
    """Run every layout once, after the speed test of as many ranks; the number of failures."""
    failures = 0
    for ranks in (1, 2, 4):
        for _ in range(SPEED_TESTS if ranks <= (os.cpu_count() or 1) else 0):
            _add(path, {"kind": "speed", "round": number, "ranks": ranks, "hardware": speed_test(ranks)})
        for layout in (*PROCESSES, *LAYOUTS):
            if layout.ranks != ranks:
                continue
            named = {"round": number, "ranks": ranks, "model": layout.model, "layout": layout.name}
            load = os.getloadavg()[0]
            try:
                _add(path, {"kind": "run", **named, "load": load, **train(layout)})
            except MeasurementError as error:
                failures += 1
                print(f"{layout.model}, {layout.name}: {error}", file=sys.stderr, flush=True)
    return failures


def _add(path: Path, record: dict[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
