"""TensorBoard's event files, written by its own package.

Every attempt has a file of its own in the same folder. Readers differ in what they honour at a restart: the loader of
TensorBoard's own page looks at steps that decrease, its Python reader at a purge event, which would also drop all of
``NAME vs samples``, and others at neither. So iterations that are done again are cut off the earlier files of the run.

Numbers are float32, as those of Megatron-LM: readers of scalars do not see a double.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from trainer.trackers.protocol import SAMPLES, Outcome, RunFacts
from trainer.trackers.scalars import BY_SAMPLES

_OF_SAMPLES = " vs samples"
# A record: length, checksum of the length, content, checksum of the content
# (tensorboard/summary/writer/record_writer.py).
_HEAD, _TAIL_BYTES = struct.Struct("<QI"), 4


class TensorBoardFiles:
    """Tracker that writes event files, whole after every row."""

    def __init__(self, folder: str, queue_size: int) -> None:
        """Write to ``folder``; ``queue_size`` events may wait for the disk."""
        self._folder = Path(folder).expanduser()
        self._queue_size = queue_size
        self._writer: Any = None

    def begin(self, facts: RunFacts) -> int:
        """Cut the iterations that are done again off the run's earlier files, and open a new one."""
        last = 0
        suffix = f".llmctl-{facts.run_id}"
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if path.name.startswith("events.out.tfevents.") and path.name.endswith(suffix):
                    last = max(last, cut_after(path, facts.iteration))
        self._writer = EventFileWriter(str(self._folder), self._queue_size, filename_suffix=suffix)
        for name in ("config", "layout", "origin"):
            text = json.dumps(getattr(facts, name), indent=2)
            # By attempt, since a resumed run may have another config.
            self._write(facts.attempt, [text_pb(name, f"```\n{text}\n```")])
        self._writer.flush()
        return last

    def log(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Write one row: its scalars by iteration, then those that are also drawn by samples."""
        values = {name: value for name, value in scalars.items() if name != SAMPLES}
        by_samples = {f"{name}{_OF_SAMPLES}": value for name, value in values.items() if name in BY_SAMPLES}
        self._write(iteration, [_summary(values)])
        if by_samples:
            self._write(int(scalars[SAMPLES]), [_summary(by_samples)])
        self._writer.flush()

    def end(self, outcome: Outcome) -> None:
        """Close the file."""
        del outcome
        self._writer.close()

    def _write(self, step: int, summaries: list[Any]) -> None:
        for summary in summaries:
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _summary(values: Mapping[str, float]) -> Any:
    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])


def cut_after(path: Path, iteration: int) -> int:
    """Cut an event file before its first row beyond ``iteration``, and a record that was not written whole.

    Returns:
        The last iteration that is left; 0 without any.
    """
    last = 0
    with path.open("r+b") as file:
        while True:
            start = file.tell()
            head = file.read(_HEAD.size)
            if not head:
                return last
            length = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else 0
            content = file.read(length + _TAIL_BYTES)
            step = _iteration_of(content[:length]) if len(content) == length + _TAIL_BYTES else None
            if step is None or step > iteration:
                file.truncate(start)
                return last
            last = max(last, step)


def _iteration_of(content: bytes) -> int | None:
    """The iteration of a row of scalars; 0 of anything else; None of a record that cannot be read."""
    try:
        event = Event.FromString(content)
    except DecodeError:
        return None
    tags = [value.tag for value in event.summary.value if value.HasField("simple_value")]
    return int(event.step) if tags and not tags[0].endswith(_OF_SAMPLES) else 0
