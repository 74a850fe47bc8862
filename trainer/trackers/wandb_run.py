"""A run of Weights & Biases, online or offline, by its own package.

All attempts have one run there, whose id is that of the run. Its server and its files take no step twice, so that of
iterations that are done again after a resume the first numbers stay; the computation is the same. The key comes from
the environment variable WANDB_API_KEY, which only the package reads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wandb
from wandb.proto import wandb_internal_pb2

from trainer.trackers.protocol import Outcome, RunFacts

if TYPE_CHECKING:
    from trainer.config.sections.logging import LoggingConfig

# The module adds its classes as it is imported.
_RECORD: Any = vars(wandb_internal_pb2)["Record"]
_FLUSH_S = 1.0
"""A run that is killed loses the rows since the last flush; the package's own interval is 15 s."""
# The log format of LevelDB (https://github.com/google/leveldb/blob/main/doc/log_format.md) after a header of 7 bytes:
# blocks of 32 KiB of records, each with checksum, length and kind.
_FILE_HEAD_BYTES, _BLOCK_BYTES = 7, 32768
_RECORD_HEAD = struct.Struct("<IHB")
_LAST_PARTS = (1, 4)


class WandbRun:
    """Tracker that logs to one run of Weights & Biases."""

    def __init__(self, logging: LoggingConfig) -> None:
        """Take project, names and mode from ``logging``."""
        self._logging = logging
        self._run: Any = None
        self._first = 0

    def begin(self, facts: RunFacts) -> int:
        """Start the run, or go on with it; the last step that it has.

        Raises:
            RuntimeError: there is no key, or the server cannot be reached.
        """
        logging = self._logging
        folder = Path(logging.wandb_save_dir).expanduser() if logging.wandb_save_dir else facts.folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=logging.wandb_project,
                entity=logging.wandb_entity,
                name=logging.wandb_name or facts.name,
                group=logging.wandb_group,
                tags=logging.wandb_tags or None,
                mode=logging.wandb_mode,
                id=facts.run_id,
                resume="allow",
                dir=None if folder is None else str(folder),
                config={**facts.config, "layout": dict(facts.layout), "origin": dict(facts.origin)},
                settings=_settings(),
            )
        except wandb.errors.Error as error:
            raise RuntimeError(_with_cure(str(error))) from error
        self._first = int(self._run.starting_step)
        if logging.wandb_mode == "offline":
            self._first = _last_step(Path(self._run.settings.wandb_dir), facts.run_id) + 1
        return self._first - 1

    def log(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Log a row, unless an earlier attempt has logged its step."""
        if iteration >= self._first:
            self._run.log(dict(scalars), step=iteration)

    def end(self, outcome: Outcome) -> None:
        """Finish the run, and wait until its server has all rows."""
        self._run.finish(exit_code=1 if outcome == "failed" else 0)


def _settings() -> Any:
    """Output stays in the log of the rank; settings of newer versions are left out where they are unknown."""
    wanted: dict[str, Any] = {"console": "off", "silent": True, "x_transaction_log_flush_interval": _FLUSH_S}
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def _with_cure(problem: str) -> str:
    line = " ".join(problem.split())
    if "API key" in problem or "api_key" in problem:
        return f"{line} Submit with --secret WANDB_API_KEY, or set logging.wandb_mode: offline"
    return f"{line}; where nodes do not reach the server, set logging.wandb_mode: offline"


def _last_step(folder: Path, run_id: str) -> int:
    """The last step in the files of earlier offline attempts of a run; 0 without."""
    files = folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    return max((step for path in files for step in steps_of(path)), default=0)


def steps_of(path: Path) -> Iterator[int]:
    """Steps of all whole rows in a file of an offline run; the last row may have been cut by a kill."""
    for content in _records(path.read_bytes()[_FILE_HEAD_BYTES:]):
        record = _RECORD.FromString(content)
        if record.WhichOneof("record_type") == "history":
            yield record.history.step.num


def _records(data: bytes) -> Iterator[bytes]:
    place, parts = _FILE_HEAD_BYTES, b""
    while place - _FILE_HEAD_BYTES + _RECORD_HEAD.size <= len(data):
        if _BLOCK_BYTES - place % _BLOCK_BYTES < _RECORD_HEAD.size:
            place += _BLOCK_BYTES - place % _BLOCK_BYTES
            continue
        begin = place - _FILE_HEAD_BYTES
        _, length, kind = _RECORD_HEAD.unpack_from(data, begin)
        part = data[begin + _RECORD_HEAD.size : begin + _RECORD_HEAD.size + length]
        if len(part) < length or not kind:
            return
        place += _RECORD_HEAD.size + length
        parts += part
        if kind in _LAST_PARTS:
            yield parts
            parts = b""
