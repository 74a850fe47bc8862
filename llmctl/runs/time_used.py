"""Time that runs have used, over all their attempts."""

import time
from collections.abc import Sequence

from llmctl.runs.facts import parse_ending, parse_started
from llmctl.runs.record import RunRecord
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport

_SMALL = 16 * 1024


def seconds_used(records: Sequence[RunRecord], running: Sequence[bool], transport: Transport) -> list[float]:
    """Seconds from start to end of all attempts of each run, in order. Costs two round trips.

    An attempt without an end counts until now if it is the last one of a running run, and else not at all: nobody
    knows when it ended.

    Args:
        records: the runs.
        running: for each run, True if it is running.
        transport: the machine with the run directories.
    """
    folders = [f"{record.run_dir}/attempts" for record in records]
    listed = transport.list_names(folders) if folders else []
    numbers = [sorted(int(name) for name in names if name.isdecimal()) for names in listed]
    places = [f"{folder}/{number}" for folder, present in zip(folders, numbers, strict=True) for number in present]
    reads = [FileRead(f"{place}/{name}", limit=_SMALL) for place in places for name in ("started.json", "exit.json")]
    parts = iter(transport.read_parts(reads) if reads else [])
    used = []
    for present, is_running in zip(numbers, running, strict=True):
        total = 0.0
        for number in present:
            started, ending = next(parts), next(parts)
            begun = parse_started(started.data) if started is not None else None
            ended = parse_ending(ending.data) if ending is not None else None
            end = ended.time if ended is not None else time.time() if is_running and number == present[-1] else None
            if begun is not None and begun.time is not None and end is not None:
                total += max(0.0, end - begun.time)
        used.append(total)
    return used
