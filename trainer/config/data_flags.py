"""Flags of ``llmctl data``, declared once: llmctl checks them, ``python -m trainer data`` takes them. Torch-free.

Names are those of Megatron-LM's tools/preprocess_data.py and merge_datasets.py, and shorter aliases.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from trainer.config.command_parser import CommandParser, Refused, WithoutEffect
from trainer.config.megatron_flags import NOT_OF_TEXT, NOT_OF_TEXT_SAID, REFUSED, WITHOUT_EFFECT, TokenizerType

TOKENIZER_TYPES: tuple[str, ...] = get_args(TokenizerType)
ENDINGS = {"byte-level-bpe": ".json", "unigram": ".model", "bpe": ".model", "wordpiece": ".txt"}
"""Kind of vocabulary -> what the name of its file ends in; the first kind of an ending is its default."""
_TOLD = "unset: told from the files"
_PADDED = "vocabularies are padded for a model, by its config"
_PASSED_OVER = (
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
    "numbers of workers are not tried out: without --workers each CPU of the job has one, and any number writes the "
    "same bytes; leave it out"
)
_ALL_DOCUMENTS = "all documents are prepared; leave it out, or cut the input, as by head -n N in.jsonl >less.jsonl"
_INPUT = (
    "files, quoted patterns or folders: .jsonl, .json and .ndjson hold a document per line, .parquet one per row, all "
    "others are plain text; .gz, .zst, .bz2 and .xz of them"
)
_PAIRS = "prefixes of .bin/.idx pairs, one of their files, or folders of pairs"
_Values = int | str
"""How many values a repeatable flag takes at a time, as of argparse: 1, or "+" as in Megatron-LM's scripts."""


def parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """The flags of ``llmctl data COMMAND``; ends the process with a sentence and exit code 2 where they are wrong.

    Inputs may be named without a flag. Flags that can be repeated then take one value each; with Megatron-LM's
    ``--input`` they take several at a time.
    """
    is_megatrons = any(word == "--input" or word.startswith("--input=") for word in arguments)
    parser = parser_of(command, "+" if is_megatrons else 1)
    options = parser.parse_intermixed_args(arguments)
    options.input = [*options.paths, *options.input]
    if not options.input:
        parser.error("there is no input; name files or folders")
    return options


def parser_of(command: str, several: _Values = 1) -> CommandParser:
    """The parser of one command: prepare, train-tokenizer, inspect or merge."""
    add, description = _COMMANDS[command]
    metavar, text = ("PATH", _PAIRS) if command in ("inspect", "merge") else ("INPUT", _INPUT)
    parser = CommandParser(prog=f"llmctl data {command}", description=description, allow_abbrev=False, add_help=False)
    parser.add_argument("paths", nargs="*", metavar=metavar, help=text)
    parser.add_argument("--input", nargs="+", default=[], action="extend", metavar="PATH", help="the same")
    add(parser, several)
    return parser


def _add_prepare(parser: argparse.ArgumentParser, several: _Values) -> None:
    parser.add_argument(
        "--output", "--output-prefix", dest="output_prefix", required=True, metavar="PREFIX", help="of the pairs' names"
    )
    _add_keys(parser, several)
    parser.add_argument(
        "--text-document", choices=["file", "paragraph", "line"], help="what is a document in plain text (default file)"
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--split-sentences", action="store_true", help="make each sentence a sequence, as BERT and T5 want it"
    )
    parser.add_argument("--keep-newlines", action="store_true", help="keep the white space after sentences")
    parser.add_argument("--on-error", choices=["stop", "skip"], default="stop", help="at what is no document")
    parser.add_argument("--restart", action="store_true", help="throw away what an unfinished run has done")
    parser.add_argument("--workers", type=_count, metavar="N", help="processes per node (default: its CPUs)")
    parser.add_argument("--log-interval", type=int, default=1, metavar="N", help="documents between lines of progress")
    # llmctl gives these: of its job's nodes, and before it.
    parser.add_argument("--nodes", type=_count, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--node", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--attempt", default="", help=argparse.SUPPRESS)
    _add_check(parser)
    accepted = parser.add_argument_group("accepted and without effect")
    accepted.add_argument("--partitions", type=_count, metavar="N", help="inputs are always cut for the workers")
    accepted.add_argument("--keep-sequential-samples", action="store_true", help="the order is always kept")
    accepted.add_argument("--lang", metavar="NAME", help="sentences end by rules for all languages")
    accepted.add_argument("--dataset-impl", choices=["mmap"], help="the only format")
    accepted.add_argument("--chunk-size", action=WithoutEffect, nargs=1, help="chunks are cut by bytes")
    for flag in ("--find-optimal-num-workers", "--workers-to-check", "--performance-dir"):
        parser.add_argument(flag, action=Refused, const=_NO_TRIALS)
    parser.add_argument("--max-documents", action=Refused, const=_ALL_DOCUMENTS)
    add_tokenizer_flags(parser, several)


def _add_train_tokenizer(parser: argparse.ArgumentParser, several: _Values) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="tokenizer.json, a SentencePiece .model or BERT's vocab.txt",
    )
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="tokens, special ones included")
    parser.add_argument(
        "--model", choices=list(ENDINGS), help="unset: byte-level-bpe; unigram for .model, wordpiece for .txt"
    )
    _add_keys(parser, several)
    parser.add_argument(
        "--special-tokens",
        nargs=several,
        default=[],
        action="extend",
        metavar="NAME",
        help="further tokens that no text becomes",
    )
    parser.add_argument("--keep-case", action="store_true", help="wordpiece: keep capitals and accents")
    parser.add_argument(
        "--sample-bytes",
        type=_bytes,
        metavar="N",
        help="learn from so much text, in stretches spread evenly over the files, as 500M or 2G; unset: 4G, or 400M "
        "for unigram and bpe, which hold all of it in memory",
    )
    _add_check(parser)


def _add_inspect(parser: argparse.ArgumentParser, several: _Values) -> None:
    parser.add_argument("--samples", type=_number, default=3, metavar="N", help="beginnings of documents (default 3)")
    parser.add_argument("--verify", action="store_true", help="read every token, and compare with the checksums")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_tokenizer_flags(parser, several)


def _add_merge(parser: argparse.ArgumentParser, several: _Values) -> None:
    del several
    parser.add_argument(
        "--output", "--output-prefix", dest="output_prefix", required=True, metavar="PREFIX", help="the pair to write"
    )
    parser.add_argument("--multimodal", action=Refused, const="pairs of text alone are read here; leave it out")


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser, _Values], None], str]] = {
    "prepare": (
        _add_prepare,
        "Turn text into Megatron-LM's .bin/.idx: PREFIX_KEY_document, or _sentence, with a manifest. Killed or "
        "cancelled at any instant, the same command goes on where it was, and makes the same bytes. On another "
        "cluster than this machine it is a job: llmctl resume RUN goes on with it.",
    ),
    "train-tokenizer": (
        _add_train_tokenizer,
        "Learn a vocabulary of text; the same text gives the same file. On a cluster it is a job.",
    ),
    "inspect": (
        _add_inspect,
        "Show documents, tokens, lengths and samples, and say what is damaged; exit code 3 if anything is.",
    ),
    "merge": (
        _add_merge,
        "Join pairs that were made with one tokenizer into one, in the order in which they are named.",
    ),
}


def _add_keys(parser: argparse.ArgumentParser, several: _Values) -> None:
    parser.add_argument(
        "--json-keys",
        nargs=several,
        default=[],
        action="extend",
        metavar="KEY",
        help="key, or column, of the text (default text); repeatable",
    )


def _add_check(parser: argparse.ArgumentParser) -> None:
    # Looks at what the flags name, and writes nothing: llmctl's look before a job is submitted.
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)


def add_tokenizer_flags(parser: argparse.ArgumentParser, several: _Values = "+") -> None:
    """Add the flags of a command that tokenizes, under Megatron-LM's names."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", type=_type, metavar="TYPE", help=f"{', '.join(TOKENIZER_TYPES)}; {_TOLD}")
    group.add_argument(
        "--tokenizer-model",
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json, SentencePiece .model, .tiktoken ranks, or a folder that holds a tokenizer's files",
    )
    group.add_argument("--vocab-file", type=Path, metavar="FILE", help="vocab.json (GPT-2) or vocab.txt (BERT)")
    group.add_argument("--merge-file", type=Path, metavar="FILE", help="merges.txt (GPT-2)")
    group.add_argument("--vocab-size", type=int, metavar="N", help="how many numbers a NullTokenizer takes")
    group.add_argument("--vocab-extra-ids", type=_number, default=0, metavar="N", help="T5: number of <extra_id_i>")
    group.add_argument(
        "--tokenizer-special-tokens",
        "--tiktoken-special-tokens",
        "--special-tokens",
        nargs=several,
        default=[],
        action="extend",
        metavar="NAME",
        help="tokens to add after the vocabulary; repeatable",
    )
    group.add_argument(
        "--tiktoken-pattern", metavar="PATTERN", help="r50k, p50k, cl100k, o200k, v1, v2 or a regular expression"
    )
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=_number,
        default=1000,
        metavar="N",
        help="ids before the first rank of a list",
    )
    group.add_argument(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="add what a tokenizer.json puts around a text, and read special tokens in it, as Megatron-LM does",
    )
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        dest="tokenizer_hf_include_special_tokens",
        action="store_false",
        help="text is only text: the default",
    )
    group.add_argument("--eod-token", metavar="NAME", help="name of the token that ends a document, if not told")
    _add_megatrons(parser)


def _add_megatrons(parser: argparse.ArgumentParser) -> None:
    """Its flags that scripts give, and that change nothing here or cannot be."""
    accepted = parser.add_argument_group("tokenizer: accepted and without effect")
    for name in _PASSED_OVER:
        flag = WITHOUT_EFFECT[name]
        accepted.add_argument(f"--{name}", action=WithoutEffect, nargs=flag.values, help=flag.reason)
    accepted.add_argument("--no-pad-vocab-size", "--disable-pad-vocab-size", action=WithoutEffect, help=_PADDED)
    for name in ("padded-vocab-size", "make-vocab-size-divisible-by"):
        accepted.add_argument(f"--{name}", action=WithoutEffect, nargs=1, help=_PADDED)
    for name in _REFUSED:
        parser.add_argument(f"--{name}", action=Refused, const=REFUSED[name])


def _number(word: str) -> int:
    if not re.fullmatch(r"\d+", word, re.ASCII):
        raise argparse.ArgumentTypeError(f"{word!r} is no number of tokens, 0 or more")
    return int(word)


def _type(name: str) -> str:
    if name in NOT_OF_TEXT:
        raise argparse.ArgumentTypeError(f"{name}: {NOT_OF_TEXT_SAID}")
    if name not in TOKENIZER_TYPES:
        raise argparse.ArgumentTypeError(f"{name!r} is not available here; there are {', '.join(TOKENIZER_TYPES)}")
    return name


def _count(word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is less than 1")
    return number


def _bytes(word: str) -> int:
    """A number of bytes, as 500M or 2G."""
    unit = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(word[-1:].upper(), 1)
    try:
        number = int(float(word[:-1]) * unit) if unit > 1 else int(word)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{word!r} is no number of bytes, as 500M or 2G") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is less than 1")
    return number
