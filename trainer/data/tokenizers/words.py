"""Which tokens begin a word: what whole-word masking needs of a vocabulary.

WordPiece marks tokens that continue a word (##ing); SentencePiece and byte-level BPE mark those with a space in front
(U+2581 and U+0120). With the latter a word also ends at punctuation and at line ends, as it does for WordPiece, whose
text is cut there beforehand; and where no spaces are written, each token is a word.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

UNSPACED = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"}
"""How Unicode's names of letters begin that are written without spaces between words."""

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class WordPieces:
    """Two flags per id, bool [V].

    Attributes:
        begins: a word begins with this token, whatever stands before it.
        ends: a word begins after this token, whatever it is.
    """

    begins: Flags
    ends: Flags

    def starts(self, tokens: np.ndarray[tuple[int], np.dtype[np.integer]]) -> Flags:
        """Where in ``tokens`` [S] a word begins, bool [S]; the first token always begins one."""
        found: Flags = self.begins[tokens]
        found[1:] |= self.ends[tokens[:-1]]
        found[:1] = True
        return found


def words_by_prefix(pieces: Iterable[str], continuation: str) -> WordPieces:
    """Of a vocabulary that marks what continues a word, such as WordPiece's ``##``."""
    begins = np.array([not piece.startswith(continuation) for piece in pieces], np.bool_)
    return WordPieces(begins, np.zeros_like(begins))


def words_by_suffix(pieces: Iterable[str], end: str) -> WordPieces:
    """Of a vocabulary that marks what ends a word, such as ``</w>``."""
    ends = np.array([piece.endswith(end) for piece in pieces], np.bool_)
    return WordPieces(np.zeros_like(ends), ends)


def words_by_text(texts: Iterable[str | None]) -> WordPieces:
    """Of a vocabulary that keeps the space before a word.

    Args:
        texts: of each id, what it says, with plain spaces; None for special tokens, which are words of their own.
            U+FFFD stands for a part of a character, which never begins a word.
    """
    flags = [(text is None or _opens(text), text is None or _closes(text)) for text in texts]
    begins = np.array([begin for begin, _ in flags], np.bool_)
    return WordPieces(begins, np.array([end for _, end in flags], np.bool_))


def _opens(text: str) -> bool:
    return bool(text) and (_is_outside(text[0]) or _is_unspaced(text[0]))


def _closes(text: str) -> bool:
    # A lone space belongs to the word that follows.
    return bool(text) and text[-1] != " " and _is_outside(text[-1])


def _is_outside(letter: str) -> bool:
    """Space, punctuation, symbol or control character: nothing that stands within a word."""
    return letter != "\ufffd" and unicodedata.category(letter)[0] in "ZPSC"


def _is_unspaced(letter: str) -> bool:
    # Not marks, nor the one that lengthens a vowel: they go on with a word.
    return unicodedata.category(letter) == "Lo" and unicodedata.name(letter, "").partition(" ")[0] in UNSPACED
