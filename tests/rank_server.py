"""Rank server: the process from which tests fork their ranks, with all imports done once per session.

Importing torch and the trainer, and what torch itself imports at the first training step, takes a rank three seconds;
forking it takes milliseconds. tests.conftest ends the server with the session; without pytest it ends with its parent.
"""

import multiprocessing
import multiprocessing.forkserver
import os
from multiprocessing.context import ForkServerContext
from unittest import mock

# Without these settings, glibc returns large tensors to the kernel at every step and faults them in again. Each process
# reads them when it starts.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "16777216",
}
_IMPORTED = [
    "numpy",
    "pytest",
    "torch",
    # Optimizers and recomputation import it when they are first called.
    "torch._dynamo",
    "torch.distributed",
    "trainer.data_parallel.fully_sharded",
    "trainer.ops.dispatch.registry",
    "trainer.training.pretraining",
    "tests.trainer.parity.layout_parity",
]


def rank_context() -> ForkServerContext:
    """Start the server; returns its multiprocessing context. One CPU thread unless the environment sets more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    with mock.patch.dict(os.environ, {**ALLOCATOR, "OMP_NUM_THREADS": threads}):
        multiprocessing.forkserver.ensure_running()
    return context


def stop_rank_server() -> None:
    """Wait for the server to end, if a server runs."""
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
