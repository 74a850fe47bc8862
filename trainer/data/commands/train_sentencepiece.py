"""Train a SentencePiece model: unigram (Kudo 2018, arXiv:1804.10959) or BPE, with byte fallback."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from trainer.data.errors import DataError
from trainer.data.tokenizers.vocabulary_size import check_size, too_little_text

LONGEST_LINE = 1000
"""Characters; at most four times as many bytes, within the library's limit of 4,192, above which lines are dropped."""
COVERAGE = 0.9995
"""Share of the text's characters that become pieces; the rest, mostly rare ideographs, is spelled in bytes."""
THREADS = 16
"""Fixed on any number of cores: the library sums floats per thread, and other partitions would round
differently."""
CONTROL_NAMES = ("<unk>", "<s>", "</s>", "<pad>")
_BYTES = 256


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int, kind: Literal["unigram", "bpe"], special_tokens: Sequence[str]
) -> bytes:
    """Return the content of a .model of ``vocab_size`` pieces, learned line by line.

    Text is not normalised, so that decoding restores every text; runs of spaces, as in code, may become pieces.
    Line ends are always spelled in bytes. The same texts give the same bytes. Memory: the whole text, several times.

    Args:
        texts: training text.
        vocab_size: number of pieces, including 256 bytes, <unk>, <s>, </s> and <pad>.
        kind: kind of model.
        special_tokens: names of further special tokens, which never occur in encoded text.

    Raises:
        DataError: sentencepiece is not installed, or the texts are too small for so many pieces.
    """
    try:
        from sentencepiece import SentencePieceTrainer
    except ModuleNotFoundError:
        raise DataError("--model: needs the package sentencepiece; install it: pip install sentencepiece") from None
    check_size(vocab_size, *smallest_sentencepiece(special_tokens))
    content = io.BytesIO()
    stopped: list[BaseException] = []
    problem = None
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_lines(texts, stopped),
            model_writer=content,
            vocab_size=vocab_size,
            model_type=kind,
            control_symbols=[name for name in dict.fromkeys(special_tokens) if name not in CONTROL_NAMES],
            byte_fallback=True,
            character_coverage=COVERAGE,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            pad_id=3,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        problem = _reason(error)
    # The library replaces an error of the texts by its own error.
    for cause in stopped:
        raise cause
    if problem is not None:
        raise _refused(problem, vocab_size, special_tokens)
    return content.getvalue()


def smallest_sentencepiece(special_tokens: Sequence[str]) -> tuple[int, str]:
    """Return the smallest vocabulary size, and a description of this vocabulary."""
    names = [*dict.fromkeys([*CONTROL_NAMES, *special_tokens])]
    return _BYTES + len(names) + 2, f"256 bytes, {', '.join(names)}, a space and one letter"


def _lines(texts: Iterable[str], stopped: list[BaseException]) -> Iterator[str]:
    """Yield lines within the library's limit; an error of ``texts`` is added to ``stopped``."""
    try:
        for text in texts:
            for line in text.splitlines():
                for start in range(0, len(line), LONGEST_LINE):
                    yield line[start : start + LONGEST_LINE]
    except (Exception, KeyboardInterrupt) as error:
        stopped.append(error)
        raise


def _refused(problem: str, vocab_size: int, special_tokens: Sequence[str]) -> DataError:
    """Translate an error of the library, which names its own options."""
    most = re.search(r"too high \(\d+\)\. Please set it to a value <= (\d+)", problem)
    if most is not None:
        return too_little_text(int(most[1]), vocab_size, *smallest_sentencepiece(special_tokens))
    least = re.search(r"smaller than required_chars\. \d+ vs (\d+)", problem)
    if least is not None:
        return DataError(
            f"--vocab-size: {vocab_size} is below {least[1]}: 256 bytes, special tokens and the letters of the text, "
            "except the rarest; raise it"
        )
    return DataError(f"--vocab-size: a model of {vocab_size} pieces cannot be trained: {problem}")


def _reason(error: RuntimeError) -> str:
    # "INTERNAL: file.cc(1) [condition] Sentence.": only the sentence is for users.
    return " ".join(str(error).rpartition("] ")[2].split()) or "the text is too small"
