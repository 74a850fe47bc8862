"""Engines, the libraries that encode: candidates of a vocabulary, and the choice among them.

A vocabulary lists its engines, the fastest first, and last the reference, whose output the others must equal. A faster
engine is chosen if it is installed, can load the vocabulary and agrees with the reference on texts on which tokenizers
tend to differ.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from trainer.data.errors import DataError
from trainer.data.tokenizers.tokenizer import TokenBatch

REFUSALS_BEFORE_WARNING = 10
"""Failures of a fast engine in one process before a warning that it slows the run down."""


class Engine(Protocol):
    """A library with one vocabulary loaded."""

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return the tokens of each text; the caller passes only valid UTF-8.

        Raises:
            EngineRefusal: the engine fails on a text; never raised by a reference.
            DataError: a text cannot be encoded at all, or only with too much memory.
        """


class EngineRefusal(Exception):
    """Failure of an engine on a vocabulary or a text, with the reason."""


@dataclass(frozen=True)
class EngineCandidate:
    """An engine that may be used.

    Attributes:
        name: name of the required package.
        make: loads the vocabulary; raises ModuleNotFoundError without the package, EngineRefusal on failure.
    """

    name: str
    make: Callable[[], Engine]


@dataclass(frozen=True)
class Choice:
    """The chosen engine, its name, and one sentence per faster engine that was rejected."""

    engine: Engine
    name: str
    notes: tuple[str, ...] = ()


def choose_engine(candidates: Sequence[EngineCandidate], wanted: str | None, origin: str) -> Choice:
    """Choose the first of ``candidates`` that is installed and agrees with the last.

    Args:
        candidates: the fastest first, the reference last.
        wanted: name of the engine to use without comparison; None to compare.
        origin: the vocabulary's file, for messages.

    Raises:
        DataError: the wanted engine, or the reference, is not installed.
    """
    if wanted is not None:
        candidate = next((candidate for candidate in candidates if candidate.name == wanted), None)
        if candidate is None:
            known = " and ".join(candidate.name for candidate in candidates)
            raise DataError(f"{origin}: cannot be encoded by {wanted!r}, only by {known}")
        engine = _make(candidate, origin)
        if candidate is candidates[-1]:
            return Choice(engine, wanted)
        # Capture only the last candidate: the others may hold vocabularies.
        last = candidates[-1]
        return Choice(_WithFallback(wanted, engine, lambda: _make(last, origin)), wanted)
    reference = _make(candidates[-1], origin)
    notes: list[str] = []
    expected = None
    for candidate in candidates[:-1]:
        name = candidate.name
        try:
            engine = candidate.make()
            expected = expected or reference.encode_batch(hard_texts())
            if _equal(engine.encode_batch(hard_texts()), expected):
                return Choice(_WithFallback(name, engine, lambda: reference), name, _slower(name, notes))
            notes.append(f"{name} is not used, because its tokens differ")
        except ModuleNotFoundError:
            notes.append(f"{name} is not installed (pip install {name})")
        except EngineRefusal as error:
            notes.append(f"{name} is not used: {_one_line(error)}")
    return Choice(reference, candidates[-1].name, _slower(candidates[-1].name, notes))


class _WithFallback:
    """A fast engine, and the reference for batches on which the fast engine fails."""

    def __init__(self, name: str, engine: Engine, make_reference: Callable[[], Engine]) -> None:
        self._name = name
        self._refusals = 0
        self._engine = engine
        self._make_reference = make_reference

    @cached_property
    def _reference(self) -> Engine:
        return self._make_reference()

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        try:
            return self._engine.encode_batch(texts)
        except EngineRefusal as error:
            self._refusals += 1
            if self._refusals == REFUSALS_BEFORE_WARNING:
                print(
                    f"{self._name} has failed {REFUSALS_BEFORE_WARNING} times, now with: {_one_line(error)}; such "
                    "texts are encoded without it, to the same tokens but slower",
                    file=sys.stderr,
                    flush=True,
                )
            return self._reference.encode_batch(texts)


def _make(candidate: EngineCandidate, origin: str) -> Engine:
    try:
        return candidate.make()
    except ModuleNotFoundError:
        raise missing_package(origin, candidate.name) from None
    except EngineRefusal as error:
        raise DataError(f"{origin}: cannot be encoded by {candidate.name}: {error}") from None


def missing_package(origin: str, name: str) -> DataError:
    """Return the error for a file that only the missing package can read."""
    return DataError(f"{origin}: needs the package {name}; install it: pip install {name}")


def _slower(taken: str, notes: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{note}; {taken} encodes instead, to the same tokens but slower" for note in notes)


def _one_line(error: EngineRefusal) -> str:
    words = " ".join(str(error).split())
    return words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]}..."


def _equal(one: TokenBatch, other: TokenBatch) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.lengths, other.lengths)


_SENTENCES = (
    "The quick brown fox can't jump; we'll see, I'D say, they've SHOUTED'LL and it's done.",
    "  two  spaces   three\tand\ttabs \n new line\r\n\r\n windows \n\n\n  trailing   ",
    "def f(self, x=1_000):\n    return {'a': [x ** 2, -3.14e-10, 0xFF]}  # comment!!! ???\n",
    "日本語の文章です。漢字、ひらがな、カタカナ、ﾊﾝｶｸ！「括弧」１２３ 〜",
    "한국어 문장입니다. 조합형 자모 ㄱㄴㄷ, 각각 값",
    "中文没有空格，标点符号。繁體字與简体字混在一起",
    "Русский текст, ελληνικά, עברית עם ניקוד שָׁלוֹם, العربية مع تشكيل مُحَمَّد",
    "हिन्दी में क्षत्रिय, ไทยไม่มีช่องว่าง, தமிழ், ქართული, አማርኛ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵🇰🇷 👍🏽 ☺️ ✨🤖 e\u0301\u0323 \u1e0b\u0323 \u01c5 ǅ ß ſ İ ı",
    "\x00\x01\x07\x1b[31m\x7f\x80\x85\xa0\xad\u200b\u200d\u2028\u2029\u3000\ufeff\ufffd\ufffe\U0010ffff\U000e0001",
    "<s> </s> <unk> <pad> <mask> [CLS] [SEP] [MASK] [PAD] [UNK] <|endoftext|> <|im_start|> <extra_id_0> <0x0A>",
    "\u2581under \u2581\u2581 line \u0120byte \u010a level ##ing Ġ Ċ ▁",
    "1 12 123 1234 12345 1234567890 ٣٤٥ १२३ ½ ² Ⅷ 3,141.59 2026-08-22T15:22:22Z",
    "https://example.org/a_b?c=d&e=%20#f user@host.example --flag=value C:\\path\\to $HOME `x` ~/",
    "a" * 400 + " " + "ab" * 200 + " " + "=" * 300 + " " + " " * 300 + "\n" * 100 + "x" + "啊" * 150,
    "CamelCaseWords snake_case_words kebab-case HTTPServer iPhone XMLHttpRequest2 _private __init__ O'Neill",
    "",
    " ",
    "\n",
    "x",
)
_RANGES = ((32, 127), (0, 32), (127, 0x250), (0x300, 0x370), (0x3041, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4))
_RANDOM_TEXTS = 60
_LONGEST_REASON = 200


def hard_texts() -> list[str]:
    """Return fixed texts on which tokenizers that differ anywhere are likely to differ."""
    draw = random.Random(1)
    texts = list(_SENTENCES)
    for _ in range(_RANDOM_TEXTS):
        parts = draw.choices(_RANGES, weights=(12, 1, 2, 1, 2, 2, 2), k=40)
        texts.append("".join(chr(draw.randrange(*part)) + " " * (draw.random() < 0.2) for part in parts))
    return [*texts, "\n".join(_SENTENCES)]
