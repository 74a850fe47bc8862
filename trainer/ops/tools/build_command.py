"""``python -m trainer kernels build``: compile the kernels, and check that they load."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import torch

from trainer.ops.build.build_settings import BuildError, LineReport, joined, outcome_of
from trainer.ops.build.device_image import IMAGE_COMPILERS, obtain_image
from trainer.ops.dispatch.library import load_on_demand

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.ops.build.build_settings import BuildSettings

_CLEAR = "\r\x1b[K"
"""To the line's start, and erase to its end (ECMA-48, CR and EL)."""
_BAR_WIDTH = 40
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str], settings: BuildSettings) -> int:
    """Build everything that is missing. Returns 3 if a part failed, else 0."""
    options = _parser().parse_args(arguments)
    report = BarReport() if sys.stdout.isatty() else LineReport()
    for number in _ENDING:
        # As on Ctrl-C: kill the compilers, and leave no partial files.
        signal.signal(number, _leave)
    problems = []
    library = outcome_of(partial(load_on_demand, settings, report))
    if isinstance(library, BuildError):
        problems.append(library)
    else:
        print(f"{library.path}: runs on {library.level} here", flush=True)
        for architecture in options.architecture or _visible_architectures():
            image = _image(settings, architecture, report)
            if isinstance(image, BuildError):
                problems.append(image)
            else:
                print(f"{image}: for GPUs of compute capability {architecture / 10}", flush=True)
    for problem in problems:
        if problem.log:
            print(problem.log, file=sys.stderr)
        print(f"trainer kernels build: {problem.reason}", file=sys.stderr)
    return 3 if problems else 0


class BarReport(LineReport):
    """A bar at the bottom of a terminal while files are compiled."""

    def say(self, line: str) -> None:
        """Print a line in the place of the bar."""
        super().say(f"{_CLEAR}{line}")

    def progress(self, share: float | None) -> None:
        """Draw the bar; None removes it."""
        if share is None:
            print(_CLEAR, end="", flush=True)
            return
        done = int(share * _BAR_WIDTH)
        bar = "#" * done + "." * (_BAR_WIDTH - done)
        print(f"{_CLEAR}kernels: [{bar}] {int(100 * share)}%", end="", flush=True)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    for ending in _ENDING:
        # The next one must not interrupt the removal of partial files. A whole group of processes often receives a
        # signal, and then llmctl forwards its own.
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)


def _image(settings: BuildSettings, architecture: int, report: LineReport) -> Path | BuildError:
    """The image of the first compiler that works, or the errors of all."""
    failed: list[BuildError] = []
    for by in IMAGE_COMPILERS:
        image = outcome_of(partial(obtain_image, settings, by, architecture, report))
        if not isinstance(image, BuildError):
            for problem in failed:
                report.say(f"kernels: {problem.reason}")
            return image
        failed.append(image)
    every = joined(failed)
    return BuildError(f"for sm_{architecture}: {every.reason}", every.log)


def _visible_architectures() -> list[int]:
    found = (torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count()))
    return sorted({10 * major + minor for major, minor in found})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer kernels build",
        description="Compile the kernels for this machine, if they are not compiled yet. Training compiles missing "
        "kernels itself; use this command on a login node if compute nodes have no compiler.",
    )
    parser.add_argument(
        "--architecture",
        type=_architecture,
        nargs="+",
        metavar="X.Y",
        help="compute capabilities of the GPUs to compile for; default: those of this machine's GPUs",
    )
    return parser


def _architecture(text: str) -> int:
    match = re.fullmatch(r"(\d+)\.(\d)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a compute capability, such as 9.0")
    return 10 * int(match[1]) + int(match[2])
