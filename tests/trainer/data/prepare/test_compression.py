"""Compressed inputs: truncated files are refused, and large content takes little memory."""

from __future__ import annotations

import bz2
import lzma
import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import zstandard

from trainer.data.prepare.compression import open_bytes


def test_a_truncated_zst_file_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "in.txt.zst"
    content = random.Random(1).randbytes(300_000)
    packed = zstandard.compress(content)
    for length in (1, 3, 5, 200_000, len(packed) - 1):
        path.write_bytes(zstandard.compress(b"first") + packed[:length])
        with open_bytes(str(path)) as stream, pytest.raises(EOFError, match="the file ends within compressed data"):
            stream.read()
    path.write_bytes(packed * 2)
    with open_bytes(str(path)) as stream:
        assert stream.read() == content * 2


@pytest.mark.parametrize(("suffix", "compress"), [(".bz2", bz2.compress), (".xz", lzma.compress)])
def test_highly_compressed_files_take_little_memory(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    size = 64 << 20
    path = tmp_path / f"in.txt{suffix}"
    path.write_bytes(compress(bytes(size)))
    tracemalloc.start()
    try:
        with open_bytes(str(path)) as stream:
            assert sum(map(len, iter(partial(stream.read, 1 << 20), b""))) == size
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()
