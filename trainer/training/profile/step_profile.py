"""The profile of a few iterations on one rank: a trace for Perfetto, and a table of the time by kind."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import Self

from trainer.training.profile.time_by_kind import ITERATION, Event, table_lines, time_by_kind

if TYPE_CHECKING:
    import torch

    from trainer.config.sections.logging import LoggingConfig
    from trainer.distributed.step_timers import StepTimers
    from trainer.process.run_directory import RunDirectory

PHASE = "profile"
"""Phase of the heartbeat in which a trace begins and is written."""


class StepProfile:
    """Records the iterations of ``logging.profile_steps``, and writes them. Outside of them nothing is computed.

    A context manager around the training, which at its end writes a profile that the end has cut short. A rank that
    fails writes none: to end the recording would wait for the GPU, on which a collective may be left forever.
    """

    def __init__(self, steps: Sequence[int], ranks: Sequence[int], rank: int, folder: Path, has_gpu: bool) -> None:
        """Record from the first to the last of ``steps``, if they are given, on ``ranks``."""
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._ranks, self._rank, self._folder = ranks, rank, folder
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
        self._recording: profile | None = None
        self._recorded: list[int] = []

    @classmethod
    def of_run(cls, config: LoggingConfig, run: RunDirectory | None, rank: int, device: torch.device) -> StepProfile:
        """The profile that ``config`` asks for, in the attempt's folder; without a run, in the working directory."""
        folder = run.profiles if run is not None else Path("profile")
        return cls(config.profile_steps or (), config.profile_ranks, rank, folder, device.type == "cuda")

    @classmethod
    def none(cls) -> StepProfile:
        """No profile."""
        return cls((), (), 0, Path(), has_gpu=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recording is not None and kind is None:
            self._write(self._recording)

    def step(
        self, iteration: int, timers: StepTimers, beat: Callable[[str], None] = lambda _: None
    ) -> AbstractContextManager[None]:
        """The context of an iteration, which is recorded if it is one of the steps.

        A profile is written as the next iteration begins, so that a save after the last step is not kept waiting.

        Args:
            iteration: counted from 1.
            timers: their parts are marked in the trace.
            beat: told the phase before work that takes time.
        """
        if iteration in self._steps:
            return self._step(iteration, timers, beat)
        if self._recording is not None:
            beat(PHASE)
            self._write(self._recording)
        return nullcontext()

    @contextmanager
    def _step(self, iteration: int, timers: StepTimers, beat: Callable[[str], None]) -> Iterator[None]:
        if self._rank not in self._ranks:
            yield
            if self._rank == 0 and iteration == self._steps[-1]:
                ranks = ", ".join(map(str, self._ranks))
                print(f"iteration {iteration}: {self._title}: ranks {ranks} write to {self._folder}", flush=True)
            return
        if self._recording is None:
            beat(PHASE)
            self._recording = profile(activities=self._activities)
            self._recording.start()
        timers.marks_parts = True
        with record_function(f"{ITERATION}{iteration}"):
            yield
        self._recorded.append(iteration)
        timers.marks_parts = False
        if iteration == self._steps[-1]:
            self._recording.stop()

    @property
    def _title(self) -> str:
        steps = self._recorded or self._steps
        return f"profile of iterations {steps[0]} to {steps[-1]}"

    def _write(self, recording: profile) -> None:
        """Write trace and table, and tell where; a folder that cannot be written is told in one line."""
        self._recording = None
        if self._recorded[-1:] != [self._steps[-1]]:
            recording.stop()
        if not self._recorded:
            return
        path = self._folder / f"rank-{self._rank:05d}.json.gz"
        where, lines = f"iteration {self._recorded[-1]}: {self._title}", list[str]()
        try:
            self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            _write_trace(recording, path)
            lines = [f"{where} in {path}", *table_lines(time_by_kind(_events(recording)))]
            path.with_name(f"rank-{self._rank:05d}.txt").write_text("\n".join(lines) + "\n")
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            lines = lines or [f"{where} could not be written to {path}: {reason}; training goes on"]
        print("\n".join(lines), flush=True)


def _write_trace(recording: profile, path: Path) -> None:
    """Write a Chrome trace, compressed.

    Raises:
        OSError, RuntimeError: the folder cannot be written.
    """
    # torch's writer leaves a file of another name behind, and says nothing, if the disk is full.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as place:
        plain, packed = Path(place, path.stem), Path(place, path.name)
        recording.export_chrome_trace(str(plain))
        if not plain.exists():
            raise OSError("torch could not write the trace; the disk may be full")
        with plain.open("rb") as file, gzip.open(packed, "wb", compresslevel=6) as out:
            shutil.copyfileobj(file, out, 1 << 20)
        packed.replace(path)


def _events(recording: profile) -> list[Event]:
    """The events of a profile, for ``time_by_kind``."""
    return [
        Event(
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.thread if event.device_type.name == "CPU" else None,
            event.is_user_annotation,
            event.is_async,
        )
        for event in recording.events()  # type: ignore[no-untyped-call]
    ]
