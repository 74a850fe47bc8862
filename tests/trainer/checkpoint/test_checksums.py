"""Checksums of files: the same with and without zlib-ng, on any machine that reads a checkpoint."""

import itertools
import os
import subprocess
import sys
import zlib

import pytest

from trainer.checkpoint import checksums

WITHOUT = "import sys; sys.modules['zlib_ng'] = None; "
CHECK = (
    "from pathlib import Path; from trainer.checkpoint.checksums import crc32, checksum_file;"
    "print(crc32.__module__, *checksum_file(Path(sys.argv[1])))"
)


@pytest.mark.parametrize("size", [0, 1, 4097, checksums.BLOCK_BYTES, 2 * checksums.BLOCK_BYTES + 13])
def test_the_values_are_those_of_zlib(tmp_path, size):
    data = os.urandom(size)
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as file, checksums.ChecksumWriter(file) as writer:
        for start, end in itertools.pairwise(sorted({0, 1 % (size + 1), size // 3, size})):
            writer.write(data[start:end])
        written = writer.close()
    blocks = [data[start : start + checksums.BLOCK_BYTES] for start in range(0, size, checksums.BLOCK_BYTES)]
    assert written == (size, [zlib.crc32(block) for block in blocks])
    assert checksums.checksum_file(path) == [zlib.crc32(block) for block in blocks]


def test_a_machine_without_zlib_ng_reads_the_same(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(5 << 20))
    said = [
        subprocess.run([sys.executable, "-c", start + CHECK, str(path)], check=True, capture_output=True, text=True)
        for start in ("import sys; ", WITHOUT)
    ]
    (fast, *values), (plain, *others) = (one.stdout.split() for one in said)
    assert (fast, plain) == ("zlib_ng.zlib_ng", "zlib")
    assert values == others != []
