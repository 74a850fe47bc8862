"""Writes of many buffers at once, to the last byte."""

import fcntl
import itertools
import os
import resource
import signal
import struct
import termios
import threading

import pytest

from trainer.checkpoint.block_writes import EarlyWriter
from trainer.checkpoint.checksums import BLOCK_BYTES, ChecksumWriter, checksum_file


def pieces_of(data, sizes):
    ends = list(itertools.accumulate(sizes))
    assert ends[-1] == len(data)
    return [memoryview(data)[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def test_more_buffers_than_one_call_takes(tmp_path):
    data = os.urandom(7000)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        EarlyWriter(file.fileno()).write(pieces_of(data, [1, 0, 2, 4] * 1000))
    assert (tmp_path / "file").read_bytes() == data


def waiting_bytes(descriptor):
    return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]


def test_a_call_that_writes_a_part_is_followed_by_one_for_the_rest():
    data, found, caught = os.urandom(1 << 20), [], []
    reading, writing = os.pipe()
    room = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    writer = threading.main_thread().ident

    def interrupt_and_read():
        while waiting_bytes(reading) < room:
            pass
        # The pipe is full, so that a call has written a part. It returns at a signal.
        signal.pthread_kill(writer, signal.SIGUSR1)
        while piece := os.read(reading, 1 << 16):
            found.append(piece)

    previous = signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))
    reader = threading.Thread(target=interrupt_and_read)
    reader.start()
    try:
        EarlyWriter(writing).write(pieces_of(data, [3, room - 10, 20, len(data) - room - 13]))
    finally:
        os.close(writing)
        reader.join()
        os.close(reading)
        signal.signal(signal.SIGUSR1, previous)
    assert caught == [1]
    assert b"".join(found) == data


def test_the_error_of_a_full_disk_is_raised(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with (tmp_path / "file").open("wb", buffering=0) as file, pytest.raises(OSError, match="File too large"):
            EarlyWriter(file.fileno()).write([memoryview(bytes(5000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert (tmp_path / "file").stat().st_size == 4096


def test_checksums_over_several_batches_of_blocks(tmp_path):
    data = os.urandom(1 << 20) * 75
    with (tmp_path / "file").open("wb", buffering=0) as file, ChecksumWriter(file) as writer:
        for piece in pieces_of(data, [5, BLOCK_BYTES - 5, 1, 40 << 20, len(data) - BLOCK_BYTES - (40 << 20) - 1]):
            writer.write(piece)
        written = writer.close()
    assert (tmp_path / "file").read_bytes() == data
    assert written == (len(data), checksum_file(tmp_path / "file"))
