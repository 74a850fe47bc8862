"""Engine gigatoken: byte-level and SentencePiece BPE at tens of megabytes per second and core.

gigatoken caches the tokens of every word, so that its memory grows with the text. The engine is loaded again when its
memory has grown too much.
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
"""Characters between two checks of the memory: often enough for 20 MB of growth per MB of random words, rarely enough
to cost nothing."""
GROWTH_BYTES = 44 << 20
"""Growth since loading after which the engine is loaded again: 50 MB of source code add 13 MB, 8 MB of random words 20
MB. With this limit, two processes and their parents stay below 300 MB; loading again takes 0.2 s."""
BLIND_CHARACTERS = 128_000_000
"""Characters after which the engine is loaded again on a system that does not report a process's memory."""


class GigatokenEngine:
    """A vocabulary in gigatoken.

    Args:
        load: loads the vocabulary, from memory or a file; called again to empty the cache.
        before: ids to put before the tokens of each text.
        after: ids to put after the tokens of each text.

    Raises:
        ModuleNotFoundError: gigatoken is not installed.
        EngineRefusal: gigatoken cannot load this vocabulary.
    """

    def __init__(self, load: Callable[[], Any], before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        self._load = load
        self._before = np.array(before, np.uint32)
        self._after = np.array(after, np.uint32)
        self._encode: Any = None
        self._loaded = self._unseen = self._blind = 0
        self._reload()

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return the tokens of each text, computed on the calling thread.

        Raises:
            EngineRefusal: gigatoken fails on a text.
        """
        if self._unseen >= CHECK_CHARACTERS:
            self._bound_memory()
        encode = self._encode
        try:
            documents = _refusing(lambda: [encode(text) for text in texts])
        except _Panic:
            # A lock that was held during the panic is never released.
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
        # Free the old engine completely first, or memory would grow with each reload. Loading leaves garbage, too.
        self._encode = None
        return_freed_memory()
        self._encode = _refusing(self._load).encode
        return_freed_memory()
        self._loaded = resident_bytes() or 0
        self._unseen = self._blind = 0


class _Panic(EngineRefusal):
    """A panic of gigatoken's Rust code."""


def load_tokenizer_json(content: str) -> Any:
    """Load a gigatoken tokenizer from the content of a tokenizer.json."""
    from gigatoken import Tokenizer

    return Tokenizer.from_json(content)


def load_ranks(path: Path, scheme: str) -> Any:
    """Load a .tiktoken file with gigatoken's ``scheme`` for words; without special tokens."""
    from gigatoken import Tokenizer

    return Tokenizer.from_tiktoken(path, pretokenizer=scheme, special_tokens={})


def _refusing(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (ModuleNotFoundError, MemoryError):
        raise
    except BaseException as error:
        # gigatoken raises many classes; a Rust panic is a PanicException of pyo3, which is not a subclass of Exception.
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise
        raise (_Panic if is_panic else EngineRefusal)(str(error) or type(error).__name__) from None


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library can (glibc's malloc_trim)."""
    if os.name == "posix":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None on a system without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return pages * resource.getpagesize()
