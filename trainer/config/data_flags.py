"""Flags of ``llmctl data``, shared by llmctl and the trainer. Torch-free.

The names are those of Megatron-LM's tools/preprocess_data.py and merge_datasets.py, with shorter aliases.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from trainer.config.command_parser import CommandParser, Refused, WithoutEffect
from trainer.config.help.of_parser import WITHOUT_EFFECT as WITHOUT_EFFECT_TITLE
from trainer.config.megatron_flags import NOT_OF_TEXT, NOT_OF_TEXT_MESSAGE, REFUSED, WITHOUT_EFFECT, TokenizerType

TOKENIZER_TYPES: tuple[str, ...] = get_args(TokenizerType)
_INFERRED = "Default: inferred from the files."
_PADDED = "the training config pads the vocabulary"
_IGNORED = (
    "use-gigatoken",
    "tokenizer-hf-use-fast",
    "tokenizer-hf-no-use-fast",
    "legacy-tokenizer",
    "trust-remote-code",
    "tokenizer-sentencepiece-legacy",
    "null-tokenizer-pad-id",
)
_REFUSED = (
    "tokenizer-metadata",
    "chat-template",
    "null-tokenizer-eod-id",
    "no-tokenizer-sentencepiece-ignore-extra-whitespaces",
    "disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
)
_NO_TRIALS = (
    "the number of workers is not tuned: the default is one per CPU of the job, and every number writes the same "
    "bytes; leave the flag out"
)
_ALL_DOCUMENTS = "all documents are prepared; leave the flag out, or cut the input: head -n N in.jsonl >less.jsonl"
_INPUT = (
    "Files, quoted patterns or folders: .jsonl, .json and .ndjson with a document per line, .parquet with a document "
    "per row, any other file as plain text; also compressed as .gz, .zst, .bz2 or .xz."
)
_DATASETS = "Prefixes of indexed datasets, their .bin or .idx files, or folders of them."
_Values = int | str
"""argparse's nargs of a repeatable flag: 1, or "+" as in Megatron-LM's scripts."""


def parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of ``llmctl data COMMAND``.

    A wrong flag ends the process with exit code 2.

    Inputs may be positional arguments; repeatable flags then take one value each. With Megatron-LM's ``--input``
    repeatable flags take several values at a time.
    """
    is_megatrons = any(word == "--input" or word.startswith("--input=") for word in arguments)
    parser = parser_of(command, "+" if is_megatrons else 1)
    options = parser.parse_intermixed_args(arguments)
    options.input = [*options.paths, *options.input]
    if not options.input:
        parser.error("no input was given; name files or folders")
    return options


def parser_of(command: str, several: _Values = 1) -> CommandParser:
    """Parser of one command: prepare, inspect or merge."""
    add, description = _COMMANDS[command]
    metavar, text = ("PATH", _DATASETS) if command in ("inspect", "merge") else ("INPUT", _INPUT)
    parser = CommandParser(prog=f"llmctl data {command}", description=description, allow_abbrev=False)
    parser.add_argument("paths", nargs="*", metavar=metavar, help=text)
    parser.add_argument("--input", nargs="+", default=[], action="extend", metavar="PATH", help="Further inputs.")
    add(parser, several)
    return parser


def _add_prepare(parser: argparse.ArgumentParser, several: _Values) -> None:
    parser.add_argument(
        "--output",
        "--output-prefix",
        dest="output_prefix",
        required=True,
        metavar="PREFIX",
        help="Prefix of the datasets to write.",
    )
    _add_keys(parser, several)
    parser.add_argument(
        "--text-document", choices=["file", "paragraph", "line"], help="A document of plain text. Default: file."
    )
    parser.add_argument("--append-eod", action="store_true", help="End each document with the end-of-document token.")
    parser.add_argument(
        "--split-sentences", action="store_true", help="Make each sentence a sequence, as BERT and T5 need."
    )
    parser.add_argument("--keep-newlines", action="store_true", help="Keep the white space after sentences.")
    parser.add_argument(
        "--on-error", choices=["stop", "skip"], default="stop", help="Action at an invalid document. Default: stop."
    )
    parser.add_argument("--restart", action="store_true", help="Discard the work of an unfinished run.")
    parser.add_argument("--workers", type=_count, metavar="N", help="Processes per node. Default: its CPUs.")
    parser.add_argument(
        "--log-interval", type=int, default=1, metavar="N", help="Documents between progress lines. Default: 1."
    )
    # Set by llmctl for the nodes of a job.
    parser.add_argument("--nodes", type=_count, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--node", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--attempt", default="", help=argparse.SUPPRESS)
    _add_check(parser)
    accepted = parser.add_argument_group(WITHOUT_EFFECT_TITLE)
    accepted.add_argument("--partitions", type=_count, metavar="N", help="inputs are always divided over the workers")
    accepted.add_argument("--keep-sequential-samples", action="store_true", help="the order is always kept")
    accepted.add_argument("--lang", metavar="NAME", help="one set of sentence rules covers all languages")
    accepted.add_argument("--dataset-impl", choices=["mmap"], help="the only format")
    accepted.add_argument(
        "--chunk-size", action=WithoutEffect, nargs=1, help="the size of a text chunk is counted in bytes"
    )
    for flag in ("--find-optimal-num-workers", "--workers-to-check", "--performance-dir"):
        parser.add_argument(flag, action=Refused, const=_NO_TRIALS)
    parser.add_argument("--max-documents", action=Refused, const=_ALL_DOCUMENTS)
    add_tokenizer_flags(parser, several)


def _add_inspect(parser: argparse.ArgumentParser, several: _Values) -> None:
    parser.add_argument("--samples", type=_number, default=3, metavar="N", help="Documents to show. Default: 3.")
    parser.add_argument("--verify", action="store_true", help="Read every token and compare the checksums.")
    parser.add_argument("--json", action="store_true", help="Print one JSON document.")
    add_tokenizer_flags(parser, several)


def _add_merge(parser: argparse.ArgumentParser, several: _Values) -> None:
    del several
    parser.add_argument(
        "--output",
        "--output-prefix",
        dest="output_prefix",
        required=True,
        metavar="PREFIX",
        help="Prefix of the dataset to write.",
    )
    parser.add_argument(
        "--multimodal", action=Refused, const="multimodal datasets are not supported; leave the flag out"
    )


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser, _Values], None], str]] = {
    "prepare": (
        _add_prepare,
        "Tokenize text into Megatron-LM's .bin/.idx files, PREFIX_KEY_document or PREFIX_KEY_sentence, with a "
        "manifest. After an interruption the same command continues and writes the same bytes. On a cluster it runs "
        "as a job, which llmctl resume RUN continues.",
    ),
    "inspect": (
        _add_inspect,
        "Show documents, tokens, lengths and samples, and report damage; exit code 3 if anything is damaged.",
    ),
    "merge": (
        _add_merge,
        "Merge indexed datasets of the same tokenizer into one, in the given order.",
    ),
}


def _add_keys(parser: argparse.ArgumentParser, several: _Values) -> None:
    parser.add_argument(
        "--json-keys",
        nargs=several,
        default=[],
        action="extend",
        metavar="KEY",
        help="JSON key or table column of the text. Repeatable. Default: text.",
    )


def _add_check(parser: argparse.ArgumentParser) -> None:
    # Checks the inputs and writes nothing: llmctl runs the command with --check before it submits a job.
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)


def add_tokenizer_flags(parser: argparse.ArgumentParser, several: _Values = "+") -> None:
    """Add the tokenizer flags to ``parser``, under Megatron-LM's names."""
    group = parser.add_argument_group("Tokenizer")
    group.add_argument(
        "--tokenizer-type", type=_type, metavar="TYPE", help=f"{', '.join(TOKENIZER_TYPES)}. {_INFERRED}"
    )
    group.add_argument(
        "--tokenizer-model",
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="File tokenizer.json, SentencePiece .model or .tiktoken ranks, or a folder with a tokenizer's files.",
    )
    group.add_argument("--vocab-file", type=Path, metavar="FILE", help="File vocab.json (GPT-2) or vocab.txt (BERT).")
    group.add_argument("--merge-file", type=Path, metavar="FILE", help="File merges.txt (GPT-2).")
    group.add_argument(
        "--tokenizer-function", metavar="MODULE:FUNCTION", help="A tokenizer of your own: see docs/guide/hooks.md."
    )
    group.add_argument("--vocab-size", type=int, metavar="N", help="NullTokenizer: number of token ids.")
    group.add_argument(
        "--vocab-extra-ids", type=_number, default=0, metavar="N", help="T5: number of <extra_id_i> tokens. Default: 0."
    )
    group.add_argument(
        "--tokenizer-special-tokens",
        "--tiktoken-special-tokens",
        "--special-tokens",
        nargs=several,
        default=[],
        action="extend",
        metavar="NAME",
        help="Special token to append to the vocabulary. Repeatable.",
    )
    group.add_argument(
        "--tiktoken-pattern",
        metavar="PATTERN",
        help="Split pattern: r50k, p50k, cl100k, o200k, v1, v2 or a regular expression.",
    )
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=_number,
        default=1000,
        metavar="N",
        help="Ids reserved before the first rank of a JSON vocabulary. Default: 1000.",
    )
    group.add_argument(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="Add a tokenizer.json's special tokens around a text and recognise them in it: Megatron-LM's default.",
    )
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        dest="tokenizer_hf_include_special_tokens",
        action="store_false",
        help="Never add or recognise special tokens: the default.",
    )
    group.add_argument("--eod-token", metavar="NAME", help="Token that ends a document. Default: inferred.")
    _add_megatrons(parser)


def _add_megatrons(parser: argparse.ArgumentParser) -> None:
    """Add Megatron-LM's flags that are accepted without effect or refused."""
    accepted = parser.add_argument_group(WITHOUT_EFFECT_TITLE)
    for name in _IGNORED:
        flag = WITHOUT_EFFECT[name]
        accepted.add_argument(f"--{name}", action=WithoutEffect, nargs=flag.values, help=flag.reason)
    accepted.add_argument("--no-pad-vocab-size", "--disable-pad-vocab-size", action=WithoutEffect, help=_PADDED)
    for name in ("padded-vocab-size", "make-vocab-size-divisible-by"):
        accepted.add_argument(f"--{name}", action=WithoutEffect, nargs=1, help=_PADDED)
    for name in _REFUSED:
        parser.add_argument(f"--{name}", action=Refused, const=REFUSED[name])


def _number(word: str) -> int:
    if not re.fullmatch(r"\d+", word, re.ASCII):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number >= 0")
    return int(word)


def _type(name: str) -> str:
    if name in NOT_OF_TEXT:
        raise argparse.ArgumentTypeError(f"{name}: {NOT_OF_TEXT_MESSAGE}")
    if name not in TOKENIZER_TYPES:
        raise argparse.ArgumentTypeError(f"{name!r} is not supported; the types are {', '.join(TOKENIZER_TYPES)}")
    return name


def _count(word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is less than 1")
    return number
