"""A slow builder for a separate process. Torch-free, so that many start quickly."""

import os
import time

from tests.waiting import HANG_S
from trainer.ops.build.build_cache import BuildCache

NAME = "key/compiler.so"
TIMEOUT_S = HANG_S


def make_slowly(target, deadline):
    """Build, and add a line to ``builds`` beside the cache."""
    with (target.parents[4] / "builds").open("a") as builds:
        builds.write(f"{os.getpid()}\n")
    target.write_bytes(b"half of it")
    time.sleep(0.6)
    target.write_bytes(b"all of it")
    assert time.monotonic() < deadline


def obtain(folder, answers):
    """Obtain the file from the cache in ``folder``; answer with path and reported lines."""
    said = []
    cache = BuildCache(folder / "shared/kernels", folder / "node/kernels")
    answers.put((str(cache.obtain(NAME, make_slowly, said.append, limit_s=TIMEOUT_S)), said))
