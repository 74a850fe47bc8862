"""Flags of ``evaluate``, shared by llmctl and the trainer. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer.config.command_parser import CommandParser
from trainer.config.model_flags import LAYOUT, add_layout, add_source, number, take_source

PROGRAM = "llmctl evaluate"
VALUED = (
    *("--split", "--data-path", "--data-split", "--tokenizer", "--max-tokens", "--tasks", "--limit", "--checkpoint"),
    *LAYOUT,
)
"""The flags that take a value."""


def parse(arguments: Sequence[str], program: str = PROGRAM) -> argparse.Namespace:
    """Parse the flags of ``program``.

    A wrong flag ends the process with exit code 2.
    """
    parser = parser_of(program)
    options = parser.parse_args(arguments)
    take_source(parser, options)
    if options.limit is not None and options.tasks is None:
        parser.error("--limit counts items of tasks; give --tasks, or --max-tokens for a text")
    return options


def parser_of(program: str = PROGRAM) -> CommandParser:
    """Parser of the flags."""
    parser = CommandParser(
        prog=program,
        description="Loss and perplexity of a trained model on a split of its run's data or of --data-path; or, with "
        "--tasks, metrics of lm-evaluation-harness.",
        allow_abbrev=False,
    )
    add_source(parser)
    parser.add_argument(
        "--split", choices=["train", "valid", "test"], default="valid", help="Split to evaluate. Default: valid."
    )
    parser.add_argument("--data-path", metavar="PREFIX", help="Indexed dataset (.bin and .idx). Default: the run's.")
    parser.add_argument("--data-split", metavar="SHARES", help="Shares of train, valid and test. Default: the run's.")
    parser.add_argument("--max-tokens", type=number(int, 1), metavar="N", help="Evaluate only the first N tokens.")
    parser.add_argument(
        "--tasks", metavar="NAME|FILE[,..]", help="Tasks of lm-evaluation-harness: names, or .yaml files of your own."
    )
    parser.add_argument("--limit", type=number(int, 1), metavar="N", help="Evaluate only the first N items of a task.")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="Tokenizer file or folder. Default: the model's."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON document.")
    parser.add_argument("--check", action="store_true", help="Check model, data, tasks and layout; evaluate nothing.")
    add_layout(parser)
    return parser
