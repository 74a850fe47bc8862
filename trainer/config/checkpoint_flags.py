"""Flags of ``llmctl checkpoint``, shared by llmctl and the trainer. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer.config.command_parser import CommandParser

MAX_BYTES_PER_FILE = 5_000_000_000
"""Default size of the tensors in one file of an export."""
VALUED = ("--output", "--max-shard-bytes", "--against")
"""The flags that take a value."""
_CHECKPOINT = "Run directory, folder of checkpoints, or iter_*; for llmctl also a run (id, name or job id)"
_NO_VERIFY = "Do not compare logits afterwards."
DESCRIPTIONS = {
    "import": "Turn a Hugging Face folder, a GGUF file, or weights of Megatron-core (torch_dist), into a checkpoint.",
    "export": "Turn a checkpoint of any layout into a Hugging Face folder, and compare the logits of both.",
    "show": "Show family, sizes, tokenizer and model section of a checkpoint, a Hugging Face folder or a GGUF file.",
    "verify": "Compare a run's checkpoints with their checksums, or logits with a Hugging Face folder.",
}
"""Command -> its description."""


def parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of ``llmctl checkpoint COMMAND``.

    A wrong flag ends the process with exit code 2.
    """
    return parser_of(command).parse_args(arguments)


def parser_of(command: str) -> CommandParser:
    """Parser of one command: import, export, show or verify."""
    parser = CommandParser(prog=f"llmctl checkpoint {command}", description=DESCRIPTIONS[command], allow_abbrev=False)
    if command == "import":
        parser.add_argument(
            "source",
            metavar="HF_DIR|MEGATRON_DIR|FILE.gguf",
            help="Folder with a config.json and safetensors, a torch_dist checkpoint, or a GGUF file.",
        )
        parser.add_argument("--output", type=Path, required=True, metavar="CKPT", help="Folder of checkpoints to make.")
        parser.add_argument(
            "--drop-mtp", action="store_true", help="Leave out prediction layers (MTP), which no logit needs."
        )
        parser.add_argument("--no-verify", action="store_true", help=_NO_VERIFY)
        return parser
    metavar, more = (
        ("CKPT|HF_DIR|FILE.gguf", "; or a Hugging Face folder or GGUF file") if command == "show" else ("CKPT", "")
    )
    parser.add_argument("source", metavar=metavar, help=f"{_CHECKPOINT}{more}.")
    if command == "export":
        parser.add_argument("--output", type=Path, required=True, metavar="HF_DIR", help="Folder to make.")
        parser.add_argument(
            "--max-shard-bytes",
            type=_bytes,
            default=MAX_BYTES_PER_FILE,
            metavar="N",
            help="Largest size of the tensors in one file, in bytes. Default: 5000000000.",
        )
        parser.add_argument("--no-verify", action="store_true", help=_NO_VERIFY)
    elif command == "show":
        parser.add_argument("--tensors", action="store_true", help="List all tensors with dtype and shape.")
        parser.add_argument("--json", action="store_true", dest="as_json", help="Print one JSON document.")
    elif command == "verify":
        parser.add_argument("--against", type=Path, metavar="HF_DIR", help="Compare logits with this folder.")
    return parser


def _bytes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; give 1 or more")
    return int(text)
