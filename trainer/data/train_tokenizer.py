"""``python -m trainer train-tokenizer``: a byte-level BPE vocabulary from text files.

Byte-level BPE: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2; merges after
Sennrich et al. 2016 (arXiv:1508.07909), algorithm 1. All 256 bytes are in the vocabulary and nothing is normalised, so
that every text comes back as it went in.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trainer.data.corpus import pieces_at_line_ends, read_documents
from trainer.data.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""256 bytes and the end of a document."""


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a vocabulary of ``vocab_size`` tokens on ``texts`` and write it to ``path``, a tokenizer.json.

    The same texts give the same bytes, on any number of threads. Memory: the different words of the text, never the
    text.

    Raises:
        DataError: ``vocab_size`` is below 257, or the texts hold too little for so many tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(f"--vocab-size: {vocab_size} is below {SMALLEST_VOCABULARY}: 256 bytes and {END_OF_DOCUMENT}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END_OF_DOCUMENT],
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces_at_line_ends(text)), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise DataError(
            f"--vocab-size: the text yields only {tokenizer.get_vocab_size()} tokens of the {vocab_size} asked for; "
            "lower it or give more text"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(tokenizer.to_str(), encoding="utf-8")
    partial.replace(path)


def main(arguments: Sequence[str]) -> int:
    """Run the command; 3 if an input cannot be read, the size cannot be reached or the file not be written."""
    parser = argparse.ArgumentParser(prog="python -m trainer train-tokenizer", description="Train a byte-level BPE.")
    parser.add_argument("--input", type=Path, nargs="+", required=True, metavar="FILE", help="text or JSON lines")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the tokenizer.json to write")
    options = parser.parse_args(arguments)
    try:
        train_byte_level_bpe(_texts(options.input, options.json_keys), options.vocab_size, options.output)
    except DataError as error:
        print(f"trainer train-tokenizer: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"trainer train-tokenizer: {options.output}: cannot be written: {error.strerror}", file=sys.stderr)
        return 3
    print(f"{options.output}: {options.vocab_size:,} tokens")
    return 0


def _texts(paths: Sequence[Path], keys: Sequence[str]) -> Iterator[str]:
    for document in read_documents(paths, keys):
        # A plain file says the same under every key; learn from it once.
        yield from dict.fromkeys(document)
