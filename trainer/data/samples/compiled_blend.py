"""Blend order by the native library (csrc/data), in a sixth of numpy's time. Torch-free."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.samples.blend_segments import IN_NUMPY, Stepper
from trainer.data.samples.windows import Numbers

AT_ONCE = 128
"""Number of segments at once. Segments beyond the number of lanes gain nothing and cost a guess each."""
_LANES = 8


class _Segments(ctypes.Structure):
    """struct llmctl_blend_segments of csrc/data/blend_order.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "firsts")),
        *((name, ctypes.c_int64) for name in ("datasets", "segments")),
    ]


def blend_stepper(library: Path | None) -> Stepper:
    """Select the stepper: the function in ``library``, or numpy if the library has none or cannot be loaded.

    Args:
        library: trainer.ops.dispatch.library.Library.path; only a process that has imported torch can load the library.
            Nothing is compiled or searched here.
    """
    if library is None:
        return IN_NUMPY
    try:
        function = ctypes.CDLL(str(library)).llmctl_follow_blend
    except (OSError, AttributeError):
        return IN_NUMPY
    pointer = ctypes.c_void_p
    function.restype = None
    function.argtypes = [ctypes.POINTER(_Segments), ctypes.c_int64, pointer, ctypes.c_int, pointer, pointer, pointer]
    return Stepper(partial(_step, function), AT_ONCE)


def _step(
    function: Callable[..., Any],
    weights: npt.NDArray[np.float64],
    firsts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.float64],
    steps: int,
    datasets: npt.NDArray[np.integer] | None = None,
    samples: Numbers | None = None,
    /,
) -> None:
    assert weights.flags.c_contiguous and firsts.flags.c_contiguous and counts.flags.c_contiguous
    order = _Segments(weights.ctypes.data, firsts.ctypes.data, len(weights), len(firsts))
    scratch = np.empty((len(weights), _LANES))
    places: tuple[int | None, int | None] = (None, None)
    is_wide = False
    if datasets is not None and samples is not None and len(datasets):
        places, is_wide = (datasets.ctypes.data, samples.ctypes.data), datasets.itemsize == 4
    function(ctypes.byref(order), steps, counts.ctypes.data, is_wide, *places, scratch.ctypes.data)
