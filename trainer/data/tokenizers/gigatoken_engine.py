"""gigatoken: byte-level and SentencePiece BPE at tens of megabytes per second and core.

It remembers the tokens of every word that it meets, so that its memory grows with the text; it is loaded anew when
that has become too much.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.tokenizers.engines import EngineRefusal
from trainer.data.tokenizers.tokenizer import TokenBatch, join_arrays

CHECK_CHARACTERS = 2_000_000
"""Memory is looked at after about so much text: often enough at 20 MB per MB of random words, seldom enough to cost
nothing."""
GROWTH_BYTES = 44 << 20
"""So much more than when it was loaded is too much: 50 MB of source code make it 13 MB, 8 MB of random words 20 MB.
With this, two processes and those around them stay below 300 MB; to load it anew takes 0.2 s."""
BLIND_CHARACTERS = 128_000_000
"""Where the system does not tell a process its memory, the engine is loaded anew after so much text."""


class GigatokenEngine:
    """A vocabulary in gigatoken.

    Args:
        load: loads it, from memory or a file; called again to be rid of what it remembers.
        before: ids to put before the tokens of each text.
        after: ids to put after them.

    Raises:
        ModuleNotFoundError: gigatoken is not installed.
        EngineRefusal: it cannot do this vocabulary.
    """

    def __init__(self, load: Callable[[], Any], before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        self._load = load
        self._before = np.array(before, np.uint32)
        self._after = np.array(after, np.uint32)
        self._encode: Any = None
        self._loaded = self._unseen = self._blind = 0
        self._reload()

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Tokens of each text, on the calling thread.

        Raises:
            EngineRefusal: gigatoken fails on one of them.
        """
        if self._unseen >= CHECK_CHARACTERS:
            self._bound_memory()
        encode = self._encode
        try:
            documents = _refusing(lambda: [encode(text) for text in texts])
        except _Panic:
            # A lock that was held then is never free again.
            self._reload()
            raise
        if len(self._before) or len(self._after):
            documents = [np.concatenate((self._before, tokens, self._after)) for tokens in documents]
        self._unseen += sum(map(len, texts))
        return join_arrays(documents)

    def _bound_memory(self) -> None:
        self._blind += self._unseen
        self._unseen = 0
        resident = resident_bytes()
        too_much = self._blind >= BLIND_CHARACTERS if resident is None else resident - self._loaded >= GROWTH_BYTES
        if too_much:
            self._reload()

    def _reload(self) -> None:
        # The old one must go first, and wholly, or the new one would begin where it ended. Loading leaves waste, too.
        self._encode = None
        return_freed_memory()
        self._encode = _refusing(self._load).encode
        return_freed_memory()
        self._loaded = resident_bytes() or 0
        self._unseen = self._blind = 0


class _Panic(EngineRefusal):
    """What stops Rust itself."""


def load_tokenizer_json(content: str) -> Any:
    """A gigatoken tokenizer of a tokenizer.json's content."""
    from gigatoken import Tokenizer

    return Tokenizer.from_json(content)


def load_ranks(path: Path, scheme: str) -> Any:
    """A gigatoken tokenizer of a .tiktoken file, cut into words by gigatoken's ``scheme``; without special tokens."""
    from gigatoken import Tokenizer

    return Tokenizer.from_tiktoken(path, pretokenizer=scheme, special_tokens={})


def _refusing(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (ModuleNotFoundError, MemoryError):
        raise
    except BaseException as error:
        # It raises whatever it finds; what stops Rust itself is a PanicException of pyo3's, which is no Exception.
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise
        raise (_Panic if is_panic else EngineRefusal)(str(error) or type(error).__name__) from None


def return_freed_memory() -> None:
    """Give the system back what this process has freed, where the C library keeps it and can (glibc)."""
    if os.name == "posix":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return pages * resource.getpagesize()
