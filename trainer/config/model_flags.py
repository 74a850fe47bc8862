"""Flags of a command that uses a trained model: the model and its layout. Torch-free."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

SOURCE = (
    "Run directory, folder of checkpoints, iter_*, or Hugging Face folder; for llmctl also a run (id, name or job id)."
)
LAYOUT = ("--tensor-parallel", "--pipeline-parallel", "--expert-parallel")
"""The flags of the layout, which take a value."""


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the model, also under the name of release 0.1.0."""
    parser.add_argument("source", nargs="?", metavar="RUN|CKPT|HF_DIR", help=SOURCE)
    parser.add_argument("--checkpoint", metavar="DIR", help=argparse.SUPPRESS)


def take_source(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set ``options.source``; without a model, end the process with exit code 2."""
    options.source = options.source or options.checkpoint
    if not options.source:
        parser.error("give the model: RUN, CKPT or HF_DIR")


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the layout."""
    for flag, what in zip(LAYOUT, ("each layer", "the layers", "the experts"), strict=True):
        parser.add_argument(flag, type=number(int, 1), default=1, metavar="N", help=f"Divide {what} over N ranks.")


def number(kind: Callable[[str], float], smallest: int) -> Callable[[str], float]:
    """Parser of a finite number of ``smallest`` or more."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not smallest <= value < math.inf:
            word = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {word} of {smallest} or more")
        return value

    return read
