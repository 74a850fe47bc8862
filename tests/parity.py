"""Every layout of up to 8 ranks, with every model, against the serial run: ``python -m tests.parity [FILTER]``.

Prints one line per case and layout with the worst deviations, and leaves with 1 if any is too large. FILTER keeps the
lines that contain it, such as ``llama`` or ``tp2-pp2-dp2-sp``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np

from tests.trainer.layout_parity import (
    CASES,
    CURVES,
    LAYOUTS,
    SERIAL,
    SIXTEEN_BIT,
    Case,
    Deviation,
    Layout,
    deviation,
    problems,
    run_layout,
)
from tests.trainer.spawn import RankError, Ranks


def main(wanted: str) -> int:
    """Run the matrix; the exit status."""
    failures: list[str] = []
    worst: dict[str, Deviation] = {}
    started = time.monotonic()
    count = 0
    with Ranks(8) as ranks:
        for case, layouts in _matrix(wanted):
            serial = run_layout(ranks, case, SERIAL)
            for layout in layouts:
                count += 1
                try:
                    found = deviation(serial, run_layout(ranks, case, layout))
                    wrong = problems(case, found)
                    worst[case.name] = _worse(worst.get(case.name, found), found)
                    print(f"{'FAIL' if wrong else 'ok  '} {case!s:16} {layout!s:16} {found}", flush=True)
                except AssertionError as error:
                    wrong = [str(error)]
                    kind = "a rank failed" if isinstance(error, RankError) else "the ranks do not agree"
                    print(f"FAIL {case!s:16} {layout!s:16} {kind}: {error}", flush=True)
                failures += [f"{case} {layout}: {problem}" for problem in wrong]
    print(f"\n{count} runs in {time.monotonic() - started:.0f} s; the worst of each model:")
    for name, found in worst.items():
        print(f"     {name:16} {found}")
    print("\n".join(failures) if failures else "every layout computes what one process computes")
    return 1 if failures or not count else 0


def _matrix(wanted: str) -> Iterator[tuple[Case, list[Layout]]]:
    for case in (*CASES, *CURVES, *SIXTEEN_BIT):
        layouts = [layout for layout in LAYOUTS if layout != SERIAL and wanted in f"{case} {layout} "]
        if layouts:
            yield case, layouts


def _worse(one: Deviation, other: Deviation) -> Deviation:
    gradient = max(one, other, key=lambda found: found.gradient)
    parameter = max(one, other, key=lambda found: found.parameter)
    return Deviation(
        loss=np.maximum(one.loss, other.loss),
        gradient=gradient.gradient,
        gradient_name=gradient.gradient_name,
        parameter=parameter.parameter,
        parameter_name=parameter.parameter_name,
        grad_norm=np.maximum(one.grad_norm, other.grad_norm),
    )


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
