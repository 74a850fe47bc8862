"""The parity matrix in full, against the serial run: ``python -m tests.parity [--shard K/N] [FILTER...]``.

Every mesh of tests.trainer.parity.covering_array and its wider ones, and every model (on 8 ranks three of them), with
every schedule, way of recomputing and ZeRO stage that the config allows: thousands of cases. Prints one line per case
with the worst deviations, and exits with 1 if one is too large. Each FILTER keeps the lines that contain its text,
such as ``mixtral`` or ``tp=2``; --shard 2/5 runs every fifth case from the second on. --levels runs all cases at each
instruction level of tests.trainer.parity.instruction_levels that the processor has, on torch's operations and on
native kernels. --families takes the tiny models of all families of decoders.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tests.trainer.parity.covering_array import (
    FACTORS,
    MODELS_IN_FULL,
    SIXTEEN_BIT,
    WIDER_MESHES,
    case_of,
    few,
    is_meaningful,
    is_valid,
    mesh_name,
)
from tests.trainer.parity.deviation import Deviation, Reference, excesses
from tests.trainer.parity.instruction_levels import run_at_every_level
from tests.trainer.parity.layout_parity import compare, problems
from tests.trainer.parity.native_kernels import on_native_kernels
from tests.trainer.parity.parity_case import FAMILY_MODELS, Case
from tests.trainer.spawn import RankError, Ranks
from trainer.ops.build.build_settings import BuildSettings, LineReport
from trainer.ops.dispatch import library

# Besides those of the array: a tied table, biases and dropout.
MODELS_ON_8_RANKS = (*MODELS_IN_FULL, "gpt2")
_MESHES = (*FACTORS["mesh"], *map(mesh_name, WIDER_MESHES))
# Every mesh is combined with all of these; the other factors are drawn.
_IN_FULL = ("model", "schedule", "recompute", "zero")
_PLAIN = {name: values[0] for name, values in FACTORS.items()}
# The config accepts these in every combination, so one check covers all of their values, which saves minutes.
_ALWAYS_TAKEN = {name: _PLAIN[name] for name in ("documents", "overlap", "micro_batches", "steps")}


def rows(models: Sequence[str] = FACTORS["model"]) -> Iterator[dict[str, Any]]:
    """Every allowed combination of mesh, model, schedule, recompute and ZeRO stage, with one choice of the rest.

    The number of the combination seeds the draw among the allowed choices: the draw is the same in every run, and the
    factors are not correlated.
    """
    others = {name: values for name, values in FACTORS.items() if name not in ("mesh", *_IN_FULL)}
    selections = [dict(zip(others, values, strict=True)) for values in itertools.product(*others.values())]
    factors = {**FACTORS, "model": models}
    combinations = list(itertools.product(*(factors[name] for name in _IN_FULL)))
    for place, mesh in enumerate(_MESHES):
        meaningful = [selection for selection in selections if is_meaningful({**_PLAIN, "mesh": mesh, **selection})]
        for number, values in enumerate(combinations, place * len(combinations)):
            chosen = {"mesh": mesh, **dict(zip(_IN_FULL, values, strict=True))}
            if not (is_meaningful({**_PLAIN, **chosen}) and _is_affordable({**_PLAIN, **chosen})):
                continue
            # The first allowed choice in random order: as random as a draw among all allowed choices, and found sooner.
            for selection in random.Random(number).sample(meaningful, len(meaningful)):
                row = {name: {**chosen, **selection}[name] for name in FACTORS}
                if is_valid({**row, **_ALWAYS_TAKEN}):
                    yield row
                    break


def _is_affordable(row: Mapping[str, Any]) -> bool:
    return case_of(row).world_size < 8 or row["model"] in MODELS_ON_8_RANKS


def matrix(models: Sequence[str] = FACTORS["model"]) -> Iterator[Case]:
    """The cases of the matrix in full."""
    return map(case_of, rows(models))


def _shard(text: str) -> tuple[int, int]:
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N, such as 2/5")
    return int(first), int(count)


class _Tally:
    """Failures so far, and the worst of each quantity in units of its limit."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._worst: dict[str, float] = {}

    def add(self, case: Case, run: Callable[[], Deviation], native_kernels: bool) -> None:
        """Run a case and print a line about it."""
        name = f"{case}{' on native kernels' * native_kernels}"
        try:
            found = run()
        except AssertionError as error:
            kind = "a rank failed" if isinstance(error, RankError) else "the ranks do not agree"
            print(f"FAIL {name:70} {kind}: {error}", flush=True)
            self.failures.append(f"{name}: {error}")
            return
        wrong = problems(case, found, same_operations=not native_kernels)
        print(f"{'FAIL' if wrong else 'ok  '} {name:70} {found}", flush=True)
        self.failures += [f"{name}: {problem}" for problem in wrong]
        for what, excess in excesses(case, found).items():
            key = f"{case.precision} {what}"
            self._worst[key] = max(excess, self._worst.get(key, 0.0))

    def __str__(self) -> str:
        worst = "worst of its limit: " + ", ".join(f"{what} {excess:.3f}" for what, excess in self._worst.items())
        return f"{worst}\n" + ("\n".join(self.failures) or "every layout gives the results of one process")


def _run(cases: list[Case], kernels: str | None) -> _Tally:
    """Each case on torch's operations, and with ``kernels`` on native kernels of that instruction set too."""
    tally = _Tally()
    own = None
    if kernels is not None:
        own = library.load_on_demand(BuildSettings.from_variables(os.environ), LineReport()).path
    serials: dict[Case, Reference] = {}
    with Ranks(max(case.world_size for case in cases)) as ranks:
        # Cases with the same serial run are adjacent, and only one such run is kept.
        for case in sorted(cases, key=lambda case: str(case.serial)):
            if case.serial not in serials:
                serials.clear()
            tally.add(case, partial(compare, ranks, serials, case), native_kernels=False)
            # 16-bit operations with another rounding send tokens to other experts.
            if own is not None and case.precision == "fp32":
                mutation = partial(on_native_kernels, own, kernels)
                tally.add(case, partial(compare, ranks, serials, case, mutation), native_kernels=True)
    return tally


def main(arguments: list[str]) -> int:
    """Run the matrix; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", metavar="FILTER")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="K/N")
    parser.add_argument(
        "--few", action="store_true", help="a few cases of at most 4 ranks, in which every choice occurs"
    )
    parser.add_argument("--families", action="store_true", help="the families of decoders instead of the models")
    parser.add_argument("--levels", action="store_true", help="at every instruction level that this processor has")
    parser.add_argument("--kernels", choices=library.LEVELS, help="too: on native kernels of this instruction set")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all ranks on one GPU, by gloo")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    flags = parser.parse_args(arguments)
    if flags.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no usable GPU")
    if flags.levels:
        return run_at_every_level([argument for argument in arguments if argument != "--levels"])
    first, count = flags.shard
    models = tuple(FAMILY_MODELS) if flags.families else FACTORS["model"]
    chosen = (*map(case_of, few()), *SIXTEEN_BIT) if flags.few else matrix(models)
    cases = [
        case.but(device=flags.device) for case in chosen if all(requested in f"{case} " for requested in flags.filters)
    ][first - 1 :: count]
    if flags.list:
        print("\n".join(map(str, cases)))
        return 0
    print(
        f"instruction sets: torch {torch.backends.cpu.get_cpu_capability()}, native kernels {flags.kernels}", flush=True
    )
    started = time.monotonic()
    tally = _run(cases, flags.kernels)
    print(f"\n{len(cases)} cases in {time.monotonic() - started:.0f} s; {tally}")
    return 1 if tally.failures or not cases else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
