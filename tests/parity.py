"""The parity matrix in full, against the serial run: ``python -m tests.parity [--shard K/N] [FILTER...]``.

Every mesh and model of tests.trainer.covering_array with every schedule, way of recomputing and ZeRO stage that the
config allows, thousands of cases. Prints one line per case with the worst deviations, and leaves with 1 if any is too
large. Each FILTER keeps the lines that contain it, such as ``mixtral`` or ``tp=2``; --shard 2/5 runs every fifth case
from the second on.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator

import torch

from tests.trainer.covering_array import FACTORS, case_of, is_allowed
from tests.trainer.layout_parity import LIMITS, Deviation, compare, problems
from tests.trainer.parity_case import Case
from tests.trainer.spawn import RankError, Ranks

# What every case of the full matrix varies; the rest takes turns.
_IN_FULL = ("mesh", "model", "schedule", "recompute", "zero")


def matrix() -> Iterator[Case]:
    """Every allowed combination of mesh, model, schedule, recompute and ZeRO stage, each with a choice of the rest."""
    others = {name: values for name, values in FACTORS.items() if name not in _IN_FULL}
    turns = [dict(zip(others, values, strict=True)) for values in itertools.product(*others.values())]
    seen = set()
    for number, values in enumerate(itertools.product(*(FACTORS[name] for name in _IN_FULL))):
        chosen = dict(zip(_IN_FULL, values, strict=True))
        # 7 has no common divisor with the number of turns, so that all of them come, in another order each time.
        for step in range(len(turns)):
            row = {name: {**chosen, **turns[(7 * number + step) % len(turns)]}[name] for name in FACTORS}
            if is_allowed(row):
                case = case_of(row)
                if case not in seen:
                    seen.add(case)
                    yield case
                break


def _shard(text: str) -> tuple[int, int]:
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N, such as 2/5")
    return int(first), int(count)


def main(arguments: list[str]) -> int:
    """Run the matrix; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", metavar="FILTER")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="K/N")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all ranks on one GPU, by gloo")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    flags = parser.parse_args(arguments)
    if flags.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no usable GPU")
    first, count = flags.shard
    cases = [
        case.but(device=flags.device) for case in matrix() if all(wanted in f"{case} " for wanted in flags.filters)
    ][first - 1 :: count]
    if flags.list:
        print("\n".join(map(str, cases)))
        return 0
    # Cases with the same serial run stand together, and only one such run is kept.
    cases.sort(key=lambda case: str(case.serial))
    failures: list[str] = []
    worst: Deviation | None = None
    started = time.monotonic()
    with Ranks(8) as ranks:
        for _, group in itertools.groupby(cases, key=lambda case: case.serial):
            serials: dict[Case, object] = {}
            for case in group:
                try:
                    found = compare(ranks, serials, case)
                    wrong = problems(case, found)
                    worst = found if worst is None or found.gradient > worst.gradient else worst
                    print(f"{'FAIL' if wrong else 'ok  '} {case!s:70} {found}", flush=True)
                except AssertionError as error:
                    wrong = [str(error)]
                    kind = "a rank failed" if isinstance(error, RankError) else "the ranks do not agree"
                    print(f"FAIL {case!s:70} {kind}: {error}", flush=True)
                failures += [f"{case}: {problem}" for problem in wrong]
    print(f"\n{len(cases)} cases in {time.monotonic() - started:.0f} s; limits {LIMITS['fp32']}; the worst: {worst}")
    print("\n".join(failures) if failures else "every layout computes what one process computes")
    return 1 if failures or not cases else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
