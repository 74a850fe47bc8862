"""Text from new tokens, piece by piece: whole characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.data.tokenizers.tokenizer import Tokenizer

_CONTEXT = 8
"""Tokens before a new one that can change its text, such as the space that a text's first word lacks."""
_INCOMPLETE = "\ufffd"
_LONGEST_WAIT = 4
"""Tokens after which bytes that form no character are shown: a character has at most 4 bytes."""


class TextStream:
    """Turns one row's tokens into text. A piece is returned once no later token can change it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Begin behind ``prompt``."""
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT:])
        self._told = len(self._tokens)
        """Number of tokens whose text has been returned."""

    def add(self, token: int) -> str:
        """Take a token; returns the text that is now complete, which may be empty."""
        self._tokens.append(token)
        piece = self._untold()
        if piece.endswith(_INCOMPLETE) and len(self._tokens) - self._told < _LONGEST_WAIT:
            return ""
        self._tell()
        return piece

    def finish(self) -> str:
        """The rest; bytes that no token has completed are U+FFFD."""
        piece = self._untold()
        self._tell()
        return piece

    def _untold(self) -> str:
        before = self._tokenizer.decode(self._tokens[: self._told])
        return self._tokenizer.decode(self._tokens)[len(before) :]

    def _tell(self) -> None:
        self._tokens = self._tokens[-_CONTEXT:]
        self._told = len(self._tokens)


class TextRow:
    """The text of one row, which ends before the first of its stop strings."""

    def __init__(self, stream: TextStream, stop: Sequence[str] = (), tell: Callable[[str], None] | None = None) -> None:
        """Begin with an empty text.

        Args:
            stream: turns tokens into text.
            stop: strings that end the text; none may be empty.
            tell: takes each new piece of the text.
        """
        self._stream, self._stop, self._tell = stream, tuple(stop), tell
        self._held = ""
        self.text = ""
        """Text so far, without a beginning of a stop string at its end."""

    def add(self, token: int) -> bool:
        """Take a token; returns True if a stop string has ended the text."""
        self._held += self._stream.add(token)
        found = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self._release(min(found))
            self._held = ""
            return True
        self._release(len(self._held) - max((_begun(self._held, stop) for stop in self._stop), default=0))
        return False

    def finish(self) -> None:
        """Add what was held back; call it unless a stop string has ended the text."""
        self._held += self._stream.finish()
        self._release(len(self._held))

    def _release(self, length: int) -> None:
        piece, self._held = self._held[:length], self._held[length:]
        self.text += piece
        if piece and self._tell is not None:
            self._tell(piece)


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
