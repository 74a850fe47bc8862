"""Word boundaries of a vocabulary's tokens, for whole-word masking.

WordPiece marks tokens that continue a word (##ing). SentencePiece and byte-level BPE mark tokens with a space before
them (U+2581 and U+0120). With these two a word also ends at punctuation and line ends, where WordPiece splits text
beforehand. In scripts without spaces each token is a word.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

UNSPACED = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"}
"""First words of the Unicode names of letters that are written without spaces between words."""

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class WordPieces:
    """Two flags per id, bool [V].

    Attributes:
        begins: a word begins with this token, after any token.
        ends: a word begins after this token, with any token.
    """

    begins: Flags
    ends: Flags

    def starts(self, tokens: np.ndarray[tuple[int], np.dtype[np.integer]]) -> Flags:
        """Return the places in ``tokens`` [S] at which a word begins, bool [S].

        The first token always begins a word.
        """
        found: Flags = self.begins[tokens]
        found[1:] |= self.ends[tokens[:-1]]
        found[:1] = True
        return found


def words_by_prefix(pieces: Iterable[str], continuation: str) -> WordPieces:
    """Return the flags for a vocabulary that marks word continuations (WordPiece's ``##``)."""
    begins = np.array([not piece.startswith(continuation) for piece in pieces], np.bool_)
    return WordPieces(begins, np.zeros_like(begins))


def words_by_suffix(pieces: Iterable[str], end: str) -> WordPieces:
    """Return the flags for a vocabulary that marks word ends (``</w>``)."""
    ends = np.array([piece.endswith(end) for piece in pieces], np.bool_)
    return WordPieces(np.zeros_like(ends), ends)


def words_by_text(texts: Iterable[str | None]) -> WordPieces:
    """Return the flags for a vocabulary that keeps the space before a word.

    Args:
        texts: text of each id, with plain spaces; None for special tokens, each of which is a word. U+FFFD stands for
            a part of a character, which never begins a word.
    """
    flags = [(text is None or _opens(text), text is None or _closes(text)) for text in texts]
    begins = np.array([begin for begin, _ in flags], np.bool_)
    return WordPieces(begins, np.array([end for _, end in flags], np.bool_))


def _opens(text: str) -> bool:
    return bool(text) and (_is_outside(text[0]) or _is_unspaced(text[0]))


def _closes(text: str) -> bool:
    # A space alone belongs to the next word.
    return bool(text) and text[-1] != " " and _is_outside(text[-1])


def _is_outside(letter: str) -> bool:
    """True for spaces, punctuation, symbols and control characters, which end words."""
    return letter != "\ufffd" and unicodedata.category(letter)[0] in "ZPSC"


def _is_unspaced(letter: str) -> bool:
    # Marks and the vowel-lengthening mark continue a word.
    return unicodedata.category(letter) == "Lo" and unicodedata.name(letter, "").partition(" ")[0] in UNSPACED
