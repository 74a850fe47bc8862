"""Frames: every value survives the round trip, however its bytes arrive."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.transport.commands import CommandOutput
from llmctl.transport.file_reads import FilePart, FileRead
from llmctl.transport.file_writes import FileWrite, PathFacts
from llmctl.transport.processes import ProcessIdentity, ProcessReport
from llmctl.transport.ssh import frames
from llmctl.transport.ssh.frames import FrameError, FrameReader, pack

TEXT = st.text(st.characters(exclude_categories=())) | st.binary(max_size=20).map(os.fsdecode)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def unpack(data, step):
    reader, values = FrameReader(), []
    for begin in range(0, len(data), step):
        reader.feed(data[begin : begin + step])
        while (value := reader.next()) is not None:
            values.append(value[0])
    return values


@given(st.lists(VALUES, max_size=3), st.integers(1, 50))
def test_values_survive_the_round_trip(values, step):
    assert unpack(b"".join(map(pack, values)), step) == values


@pytest.mark.parametrize(
    "value",
    [
        FileRead("/a", -5, 3),
        FilePart(b"\0\xff", 3, 9),
        FileWrite("/\udcff", b"x" * 100_000, 0o755),
        PathFacts("file", "/a", "file", True, False, 1 << 60),
        ProcessIdentity(7, None, "boot"),
        ProcessReport("host", None, (True, None, False)),
        CommandOutput(-9, b"out", b"err"),
    ],
)
def test_data_classes_survive_the_round_trip(value):
    assert unpack(pack([value, {"key": value}]), 1000) == [[value, {"key": value}]]


def test_text_is_compressed_and_random_bytes_are_not():
    text, noise = b"loss 1.23 at iteration 7\n" * 10_000, os.urandom(100_000)
    assert len(pack(text)) < len(text) / 10
    assert len(pack(noise)) < len(noise) + 100
    assert unpack(pack([text, noise]), 4096) == [[text, noise]]


def test_invalid_or_too_large_frames_are_refused(monkeypatch):
    reader = FrameReader()
    reader.feed(b"Last login: today from here")
    with pytest.raises(FrameError, match="Last login"):
        reader.next()
    for header in (frames._HEADER.pack(b"LLM2", 4, 0, 0), frames._HEADER.pack(b"LLM1", frames.LIMIT, 1, 1)):
        reader = FrameReader()
        reader.feed(header + b"null")
        with pytest.raises(FrameError, match="is not a frame"):
            reader.next()
    monkeypatch.setattr(frames, "LIMIT", 1000)
    with pytest.raises(FrameError, match="exceed the limit of 1000"):
        pack(b"x" * 1001)


@pytest.mark.parametrize("kind", ["eval", "print", "os.system", "Popen"])
def test_a_frame_makes_no_other_class_than_those_of_the_protocol(kind):
    shape = json.dumps({"kind": kind, "of": ["1"]}).encode()
    with pytest.raises(KeyError, match=kind):
        unpack(frames._HEADER.pack(b"LLM1", len(shape), 0, 0) + shape, 1000)
