"""Flags of ``generate``, shared by llmctl and the trainer. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer.config.command_parser import CommandParser
from trainer.config.model_flags import LAYOUT, add_layout, add_source, number, take_source

PROGRAM = "llmctl generate"
VALUED = (
    *("--prompt", "--prompt-file", "--tokenizer", "--max-tokens", "--max-new-tokens", "--temperature", "--top-k"),
    *("--top-p", "--stop", "--seed", "--batch-size"),
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
    if not options.prompt and options.prompt_file is None:
        parser.error("give --prompt TEXT or --prompt-file FILE")
    if "" in options.stop:
        parser.error("argument --stop: is empty; give the text that ends the answer, or leave the flag out")
    return options


def parser_of(program: str = PROGRAM) -> CommandParser:
    """Parser of the flags."""
    parser = CommandParser(
        prog=program,
        description="Continue prompts with a trained model, whatever layout wrote it.",
        allow_abbrev=False,
    )
    add_source(parser)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="Text to continue. Repeatable.")
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        help='File with a prompt per line; in a .jsonl file, {"prompt": TEXT} per line.',
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="Tokenizer file or folder. Default: the model's."
    )
    parser.add_argument(
        *("--max-tokens", "--max-new-tokens"),
        dest="max_new_tokens",
        type=number(int, 0),
        default=100,
        metavar="N",
        help="Most new tokens per prompt. Default: 100.",
    )
    parser.add_argument(
        "--temperature",
        type=number(float, 0),
        default=1.0,
        metavar="T",
        help="Divisor of the logits; 0 takes the most likely token each time. Default: 1.",
    )
    parser.add_argument(
        "--top-k",
        type=number(int, 0),
        default=0,
        metavar="K",
        help="Draw from the K most likely tokens; 0: all. Default: 0.",
    )
    parser.add_argument(
        "--top-p",
        type=_share,
        default=1.0,
        metavar="P",
        help="Draw from the fewest tokens with probability P together; 1: all. Default: 1.",
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="End before this text. Repeatable.")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="Seed of the draws. Default: 1234.")
    parser.add_argument(
        "--batch-size", type=number(int, 1), default=16, metavar="N", help="Prompts at a time. Default: 16."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON document per prompt instead of text.")
    parser.add_argument("--check", action="store_true", help="Check model, prompts and layout; generate nothing.")
    add_layout(parser)
    return parser


def _share(text: str) -> float:
    value = number(float, 0)(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return value
