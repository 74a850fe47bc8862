"""build_mapping by the native kernel library (csrc/data), in a tenth of numpy's time. Torch-free."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.masked.sentence_mapping import LONG_SENTENCE, MappingRules, Rows, build_mapping, row_dtype
from trainer.data.samples.compiled import Function, functions_of

MappingBuilder = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int32], MappingRules, "int | None"], Rows]
"""build_mapping, or a function with the same result."""


class _Rules(ctypes.Structure):
    """struct llmctl_mapping_rules of csrc/data/sentence_mapping.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("longest", "one_in", "least", "most_tokens", "num_samples")),
        ("seed", ctypes.c_uint64),
    ]


def mapping_builder(library: Path | None) -> MappingBuilder:
    """Select the builder: the function in ``library``, or build_mapping if it cannot be loaded.

    Args:
        library: see functions_of.
    """
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    arguments = [pointer, number, pointer, ctypes.POINTER(_Rules), ctypes.c_int, pointer]
    found = functions_of(library, {"llmctl_sentence_mapping": (number, arguments)})
    if found is None:
        return build_mapping
    (function,) = found
    return partial(_build, function)


def _build(
    function: Function,
    document_indices: npt.NDArray[np.int64],
    sentence_lengths: npt.NDArray[np.int32],
    rules: MappingRules,
    num_samples: int | None = None,
) -> Rows:
    entries = np.ascontiguousarray(document_indices, np.int64)
    first, last = (int(entries[0]), int(entries[-1])) if len(entries) else (0, 0)
    lengths = np.ascontiguousarray(sentence_lengths[first:last], np.int32)
    wanted = 1 if num_samples is None else num_samples
    asked = _Rules(rules.longest, rules.one_in, rules.least_sentences, LONG_SENTENCE, wanted, rules.seed)
    dtype = row_dtype(sentence_lengths)
    of_corpus = (entries.ctypes.data, len(entries), lengths.ctypes.data, ctypes.byref(asked), dtype.itemsize == 8)
    rows: Rows = np.empty((int(function(*of_corpus, None)), 3), dtype)
    function(*of_corpus, rows.ctypes.data)
    return rows
