"""``python -m trainer masked-samples``: show samples of BERT or T5."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.config.command_parser import CommandParser, print_text
from trainer.config.data_flags import add_tokenizer_flags
from trainer.config.errors import ConfigError
from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import read_manifest
from trainer.data.masked.bert_dataset import BertDataset
from trainer.data.masked.masking import MaskingRules
from trainer.data.masked.t5_dataset import T5Dataset
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import settings_from_flags
from trainer.data.tokenizers.special_names import sentinel_name
from trainer.data.tokenizers.tokenizer import SpecialTokens, Tokenizer
from trainer.ops.build.build_settings import BuildError, BuildSettings

MAX_SAMPLES = 10_000
"""Largest number of samples to print."""
MANY_DOCUMENTS = 1 << 20
"""From this number of documents on, numpy takes longer than the import of torch, which the native library needs."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command.

    Exit code 3 if the data, the tokenizer or a setting is invalid.
    """
    options = _parser().parse_args(arguments)
    try:
        if not 1 <= options.samples <= MAX_SAMPLES:
            raise DataError(f"--samples: {options.samples:,} is out of range; use 1 to {MAX_SAMPLES:,}")
        settings = settings_from_flags(options)
        if not settings.is_set:
            raise DataError("masked samples need the tokenizer of the data; name it with --tokenizer-model")
        tokenizer = open_tokenizer(settings)
        prefix = options.prefix.expanduser()
        with IndexedDataset(prefix) as tokens:
            manifest = read_manifest(prefix)
            if manifest is not None:
                manifest.check_tokenizer(prefix, tokenizer, settings.name)
            describe = _describe_bert if options.model == "bert" else _describe_t5
            lines = list(describe(options, tokens, tokenizer, library_for(tokens.document_count, environment)))
    except DataError as error:
        print(f"trainer masked-samples: {error}", file=sys.stderr)
        return 3
    print_text("\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m trainer masked-samples",
        description="Show samples of masked language modelling for BERT or T5.",
    )
    parser.add_argument(
        "prefix", type=Path, metavar="PREFIX", help="of an indexed dataset whose sequences are sentences"
    )
    parser.add_argument("--model", choices=("bert", "t5"), required=True)
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="number of samples to show (default 3)")
    parser.add_argument("--seed", type=int, default=1234, help="default 1234")
    parser.add_argument("--seq-length", "--encoder-seq-length", type=int, default=512, metavar="N", help="default 512")
    parser.add_argument("--decoder-seq-length", type=int, default=128, metavar="N", help="T5 (default 128)")
    parser.add_argument(
        "--mask-prob", type=float, default=0.15, metavar="P", help="share of masked tokens (default 0.15)"
    )
    parser.add_argument(
        "--short-seq-prob", type=float, default=0.1, metavar="P", help="share of shorter samples (default 0.1)"
    )
    parser.add_argument("--bert-no-binary-head", action="store_true", help="BERT: samples of one part")
    parser.add_argument(
        "--masking-max-ngram", type=int, metavar="N", help="largest number of words in a span (default: BERT 3, T5 10)"
    )
    add_tokenizer_flags(parser)
    return parser


def library_for(documents: int, environment: Mapping[str, str]) -> Path | None:
    """Native library for this number of documents.

    None: numpy is fast enough, or no library is built.

    Never builds the library.
    """
    if documents < MANY_DOCUMENTS:
        return None
    # Imports torch, which nothing else of this command needs.
    from trainer.ops.dispatch.library import load_built

    try:
        return load_built(BuildSettings.from_variables(environment)).path
    except (BuildError, ConfigError):
        return None


def _describe_bert(
    options: argparse.Namespace, tokens: IndexedDataset, tokenizer: Tokenizer, library: Path | None
) -> Iterator[str]:
    rules = MaskingRules(options.mask_prob, _longest_run(options, 3))
    every = range(tokens.document_count)
    seq_length, has_parts = options.seq_length, not options.bert_no_binary_head
    data = BertDataset(
        tokens, every, seq_length, options.seed, tokenizer, rules, options.short_seq_prob, has_parts, library=library
    )
    write = _Writer(tokenizer)
    yield f"{len(data):,} samples per epoch"
    for number in range(options.samples):
        sample = data.sample(number)
        order = "B before A in the text" if sample.is_random else "A before B in the text"
        parts = f", {order}" if has_parts else ""
        cut = ", cut" if sample.truncated else ""
        yield f"sample {number}: {_share(sample.loss_mask, sample.padding_mask)}{parts}{cut}"
        yield f"  text    {write(sample.tokens[sample.padding_mask])}"
        yield f"  masked  {' | '.join(write(run) for run in _runs(sample.labels, sample.loss_mask))}"


def _describe_t5(
    options: argparse.Namespace, tokens: IndexedDataset, tokenizer: Tokenizer, library: Path | None
) -> Iterator[str]:
    rules = MaskingRules(options.mask_prob, _longest_run(options, 10), masking_use_geometric_distribution=True)
    every = range(tokens.document_count)
    lengths = options.seq_length, options.decoder_seq_length
    data = T5Dataset(tokens, every, *lengths, options.seed, tokenizer, rules, options.short_seq_prob, library=library)
    write = _Writer(tokenizer)
    yield f"{len(data):,} samples per epoch"
    for number in range(options.samples):
        sample = data.sample(number)
        yield f"sample {number}: {sample.encoder_mask.sum()} tokens, {sample.decoder_mask.sum()} for the decoder"
        yield f"  encoder {write(sample.encoder_tokens[sample.encoder_mask])}"
        yield f"  decoder {write(sample.decoder_tokens[sample.decoder_mask])}"


def _longest_run(options: argparse.Namespace, default: int) -> int:
    return default if options.masking_max_ngram is None else int(options.masking_max_ngram)


def _share(masked: npt.NDArray[np.bool_], filled: npt.NDArray[np.bool_]) -> str:
    return f"{filled.sum()} tokens, {masked.sum()} masked ({100 * masked.sum() / filled.sum():.1f}%)"


def _runs(labels: npt.NDArray[np.int64], is_masked: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.int64]]:
    """Labels of each masked span."""
    places = np.flatnonzero(is_masked)
    cuts = np.flatnonzero(np.diff(places) > 1) + 1
    return [labels[run] for run in np.split(places, cuts)]


class _Writer:
    """Decodes tokens to text with special tokens by name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        specials = tokenizer.specials
        self._tokenizer = tokenizer
        # [CLS] may also be the begin token, and [SEP] the end token: the later names are more informative.
        roles = [field.name for field in fields(SpecialTokens) if field.name != "sentinels"]
        self._names: dict[int, str] = {token: sentinel_name(place) for place, token in enumerate(specials.sentinels)}
        for role in roles:
            token: Any = getattr(specials, role)
            if token is not None:
                self._names[token] = f"[{role.upper()}]"

    def __call__(self, tokens: npt.NDArray[np.int64]) -> str:
        parts: list[str] = []
        for is_special, group in groupby(tokens.tolist(), self._names.__contains__):
            run = list(group)
            parts += [self._names[token] for token in run] if is_special else [self._tokenizer.decode(run)]
        # Join to one line.
        return " ".join(" ".join(parts).split())
