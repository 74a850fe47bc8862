"""The parity matrix in full, against the serial run: ``python -m tests.parity [--shard K/N] [FILTER...]``.

Every mesh of tests.trainer.parity.covering_array and its wider ones, and every model (on 8 ranks three of them), with
every schedule, way of recomputing and ZeRO stage that the config allows: thousands of cases. Prints one line per case
with the worst deviations, and leaves with 1 if any is too large. Each FILTER keeps the lines that contain it, such as
``mixtral`` or ``tp=2``; --shard 2/5 runs every fifth case from the second on.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.trainer.parity import covering_array
from tests.trainer.parity.covering_array import FACTORS, WIDER_MESHES, case_of, is_allowed, is_meaningful, mesh_name
from tests.trainer.parity.layout_parity import LIMITS, Deviation, compare, problems
from tests.trainer.parity.parity_case import Case
from tests.trainer.spawn import RankError, Ranks

# One more than in the array: a tied table, biases and dropout.
MODELS_ON_8_RANKS = (*covering_array.MODELS_ON_8_RANKS, "gpt2-hidden-dropout")
_MESHES = (*FACTORS["mesh"], *map(mesh_name, WIDER_MESHES))
# What every mesh is combined with in full; the rest is drawn.
_IN_FULL = ("model", "schedule", "recompute", "zero")
_PLAIN = {name: values[0] for name, values in FACTORS.items()}
# The config takes these whatever else it takes: it is asked once for all of their values, which saves minutes.
_ALWAYS_TAKEN = {name: _PLAIN[name] for name in ("documents", "overlap", "micro_batches")}


def rows() -> Iterator[dict[str, Any]]:
    """Every allowed combination of mesh, model, schedule, recompute and ZeRO stage, each with a choice of the rest.

    The choice is one of all that are allowed, drawn by the combination's number: the same in every run, and following
    no rule by which one factor would meet the same value of another each time.
    """
    others = {name: values for name, values in FACTORS.items() if name not in ("mesh", *_IN_FULL)}
    choices = [dict(zip(others, values, strict=True)) for values in itertools.product(*others.values())]
    combinations = list(itertools.product(*(FACTORS[name] for name in _IN_FULL)))
    for place, mesh in enumerate(_MESHES):
        meaningful = [choice for choice in choices if is_meaningful({**_PLAIN, "mesh": mesh, **choice})]
        for number, values in enumerate(combinations, place * len(combinations)):
            chosen = {"mesh": mesh, **dict(zip(_IN_FULL, values, strict=True))}
            # The first allowed one in random order is as good as any of all that are, and sooner found.
            for choice in random.Random(number).sample(meaningful, len(meaningful)):
                row = {name: {**chosen, **choice}[name] for name in FACTORS}
                if is_allowed({**row, **_ALWAYS_TAKEN}, MODELS_ON_8_RANKS):
                    yield row
                    break


def matrix() -> Iterator[Case]:
    """The cases of the matrix in full."""
    return map(case_of, rows())


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
