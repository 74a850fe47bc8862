"""``llmctl data train-tokenizer``: train a vocabulary on text files.

Byte-level BPE: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2; merges after
Sennrich et al. 2016 (arXiv:1508.07909), algorithm 1. All 256 bytes are in the vocabulary and text is not normalised,
so that decoding restores every text. The other kinds are in trainer.data.commands.train_sentencepiece and
train_wordpiece.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Literal, cast

from trainer.config.data_flags import ENDINGS, parse
from trainer.data.background import StillRunning, do_in_background
from trainer.data.commands.corpus import Corpus, pieces_at_line_ends
from trainer.data.commands.train_sentencepiece import smallest_sentencepiece, train_sentencepiece
from trainer.data.commands.train_wordpiece import smallest_wordpiece, train_wordpiece
from trainer.data.errors import DataError
from trainer.data.prepare.inputs import InputFile, find_inputs, means_one_of
from trainer.data.prepare.progress import Progress, say
from trainer.data.tokenizers.byte_level import bytes_of
from trainer.data.tokenizers.engines import missing_package
from trainer.data.tokenizers.huggingface import SPACE_MARK, decode_byte_piece
from trainer.data.tokenizers.vocabulary_size import check_size, too_little_text
from trainer.data.tokenizers.wordpiece import CONTINUATION

END_OF_DOCUMENT = "<|endoftext|>"
_BYTES = 256
SAMPLE_BYTES = {"byte-level-bpe": 4_000_000_000, "wordpiece": 4_000_000_000, "unigram": 400_000_000, "bpe": 400_000_000}
"""Default sample size. For the first two kinds the distinct words of the sample are in memory, for the others the whole
sample, about twenty times."""
_CONTRACTION = re.compile("'(?:[sdmt]|ll?|ve?|re?)")
"""Contractions that GPT-2's regular expression takes as one word despite the apostrophe, and prefixes of them."""
_PASSES = {"wordpiece": 2}
"""Number of passes over the text, if not 1: the first pass counts letters."""
_INTERRUPTED = 130


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, path: Path, special_tokens: Sequence[str] = (END_OF_DOCUMENT,)
) -> None:
    """Train with ``learn_byte_level_bpe`` and write the result to ``path``."""
    _write(path, learn_byte_level_bpe(texts, vocab_size, special_tokens))


def learn_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_DOCUMENT,)
) -> bytes:
    """Return the content of a tokenizer.json of ``vocab_size`` tokens, trained on ``texts``.

    The same texts give the same bytes, on any number of threads. Memory: the distinct words of the text, never the
    text.

    Raises:
        DataError: ``vocab_size`` is below 257, or the texts are too small for so many tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    names = [*dict.fromkeys([*special_tokens])]
    check_size(vocab_size, *smallest_byte_level(names))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=names,
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces_at_line_ends(text)), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise too_little_text(tokenizer.get_vocab_size(), vocab_size, *smallest_byte_level(names))
    return tokenizer.to_str().encode()


def smallest_byte_level(special_tokens: Sequence[str]) -> tuple[int, str]:
    """Return the smallest vocabulary size, and a description of this vocabulary."""
    names = [*dict.fromkeys(special_tokens)]
    return _BYTES + len(names), " and ".join(["256 bytes", *([", ".join(names)] if names else [])])


def _write(path: Path, content: bytes) -> None:
    """Write aside and rename, so that readers never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 3 for an unusable input, size or output."""
    options = parse("train-tokenizer", arguments)
    output = options.output.expanduser()
    try:
        kind = _kind(output, options.model)
        _check_names(kind, options.special_tokens)
        _check_size(kind, options.vocab_size, options.special_tokens)
        corpus = Corpus(
            tuple(find_inputs(options.input, _say)),
            tuple(dict.fromkeys(options.json_keys or ["text"])),
            options.sample_bytes or SAMPLE_BYTES[kind],
        )
        _check_output(output, corpus.files)
        _check_library(kind)
        if not corpus.text_bytes:
            raise DataError("--input: holds no text; give other files, or other --json-keys")
        is_sample = corpus.wanted < corpus.text_bytes
        if options.check:
            return 0
        if is_sample:
            _say(
                f"training on about {corpus.wanted / 1e6:,.0f} of {corpus.text_bytes / 1e6:,.0f} MB of text, spread "
                "evenly over the files; change the amount with --sample-bytes"
            )
        with Progress(corpus.size * _PASSES.get(kind, 1), unit="texts") as progress:
            content = do_in_background(lambda: _learn(kind, corpus, options, progress), progress.still)
        _write(output, content)
    except DataError as error:
        return _fail(str(error), 3)
    except OSError as error:
        return _fail(f"{output}: cannot be written: {error.strerror}", 3)
    except KeyboardInterrupt as error:
        code = _fail("interrupted", _INTERRUPTED)
        if isinstance(error, StillRunning):
            os._exit(code)
        return code
    print(f"{output}: {options.vocab_size:,} tokens")
    return 0


def _fail(message: str, code: int) -> int:
    _say(message)
    return code


def _say(message: str) -> None:
    say(f"llmctl data train-tokenizer: {message}")


def _kind(output: Path, model: str | None) -> str:
    by_ending = next((kind for kind, end in ENDINGS.items() if end == output.suffix), None)
    kind = model or by_ending or "byte-level-bpe"
    if by_ending is not None and output.suffix != ENDINGS[kind]:
        raise DataError(f"--output: {output} ends like {by_ending}, but {kind} needs {ENDINGS[kind]}; rename it")
    return kind


def _check_output(output: Path, inputs: Sequence[InputFile]) -> None:
    """Reject outputs that would fail only at the end."""
    if means_one_of(output, inputs):
        raise DataError(f"--output: {output} is an input, and would be lost; choose another name")
    if output.is_dir():
        raise DataError(f"--output: {output} is a folder; append a file name")
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(f"{output}: cannot be written: {folder} is not a folder with write permission")


def _check_library(kind: str) -> None:
    name = "sentencepiece" if ENDINGS[kind] == ".model" else "tokenizers"
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        raise missing_package(f"--model {kind}", name) from None


def _check_names(kind: str, names: Sequence[str]) -> None:
    """Reject names that encoded text may produce.

    Words, punctuation and spaces are separate tokens, and bytes have names.
    """
    for name in names:
        is_written = name.isprintable() and not re.search(f"[\\s{SPACE_MARK}]", name)
        is_apart = _is_cut(name) and not name.startswith(CONTINUATION) and decode_byte_piece(name) is None
        if is_apart and kind == "byte-level-bpe":
            spelled = bytes_of(name)
            is_apart = not _CONTRACTION.fullmatch(name) and (
                spelled is None or _is_cut(spelled.decode(errors="replace"))
            )
        if not is_written or not is_apart:
            raise DataError(
                f"--special-tokens: {name!r} may occur as a token of text, or cannot be stored; choose letters and "
                "punctuation without spaces, such as <NAME>"
            )


def _is_cut(name: str) -> bool:
    """True if ``name`` has punctuation and letters or digits.

    Every kind of vocabulary splits text between them.
    """
    return bool(re.search("[^\\W_]", name) and re.search(r"[!-/:-@\[-`{-~]", name))


def _check_size(kind: str, vocab_size: int, names: Sequence[str]) -> None:
    if kind == "byte-level-bpe":
        check_size(vocab_size, *smallest_byte_level([END_OF_DOCUMENT, *names]))
    elif kind == "wordpiece":
        check_size(vocab_size, *smallest_wordpiece(names))
    else:
        check_size(vocab_size, *smallest_sentencepiece(names))


def _learn(kind: str, corpus: Corpus, options: argparse.Namespace, progress: Progress) -> bytes:
    names, size = options.special_tokens, options.vocab_size
    passes = count(1)

    def read() -> Iterator[str]:
        yield from corpus.texts(progress.advance)
        if next(passes) >= _PASSES.get(kind, 1):
            progress.then(f"all text is read; training {size:,} tokens")

    if kind == "byte-level-bpe":
        return learn_byte_level_bpe(read(), size, (END_OF_DOCUMENT, *names))
    if kind == "wordpiece":
        return train_wordpiece(read, size, not options.keep_case, names).encode()
    return train_sentencepiece(read(), size, cast(Literal["unigram", "bpe"], kind), names)
