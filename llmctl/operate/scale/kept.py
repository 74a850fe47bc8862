"""The runs that belong to one scaling: a small file in the user's folder of state, by the scaling's name."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmctl.errors import RecordError
from llmctl.runs.record import json_bytes, parse_json
from llmctl.transport.file_writes import FileWrite, write_files


@dataclass(frozen=True)
class SizeRun:
    """The run of one number of nodes, as it was planned.

    Attributes:
        run_id: the run.
        nodes: number of nodes.
        devices: number of ranks.
        global_batch_size: samples of a step.
        tokens_per_step: tokens of these samples.
        predicted_s: predicted seconds of a step; None: there is no prediction.
        node_hours: at most; None for the site's default time, and where there is no scheduler.
        points: charge at most; None where unknown.
    """

    run_id: str
    nodes: int
    devices: int
    global_batch_size: int
    tokens_per_step: int
    predicted_s: float | None
    node_hours: float | None
    points: float | None


@dataclass(frozen=True)
class Scaling:
    """A scaling: what was asked for, and its runs.

    Attributes:
        name: of the scaling; its runs are called NAME-1n, NAME-2n and so on.
        cluster: name of the profile.
        is_weak: True if the global batch grows with the nodes.
        steps: iterations of each run.
        asked: the config's values by dotted key, without those that differ from size to size.
        unit: of the points.
        runs: the smallest size first.
    """

    name: str
    cluster: str
    is_weak: bool
    steps: int
    asked: Mapping[str, Any]
    unit: str
    runs: tuple[SizeRun, ...] = ()

    def with_run(self, run: SizeRun) -> "Scaling":
        """The scaling with this run, in the place of an earlier one of this size."""
        others = [other for other in self.runs if other.nodes != run.nodes]
        return replace(self, runs=tuple(sorted([*others, run], key=lambda each: each.nodes)))


@dataclass(frozen=True)
class ScalingFiles:
    """One file per scaling below ``state_dir``/scaling."""

    state_dir: Path

    def path(self, name: str) -> Path:
        """The file of a scaling."""
        return self.state_dir / "scaling" / f"{name}.json"

    def names(self) -> list[str]:
        """Names of all scalings, the newest first."""
        with suppress(FileNotFoundError), os.scandir(self.state_dir / "scaling") as found:
            files = [file for file in found if file.name.endswith(".json")]
            return [file.name.removesuffix(".json") for file in sorted(files, key=lambda file: -file.stat().st_mtime)]
        return []

    def find(self, name: str) -> Scaling | None:
        """The scaling of this name; None if there is none.

        Raises:
            RecordError: its file cannot be read.
        """
        if "/" in name:
            return None
        path = self.path(name)
        try:
            values = parse_json(path, path.read_bytes())
            return Scaling(**{**values, "runs": tuple(SizeRun(**run) for run in values["runs"])})
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
        except (KeyError, TypeError):
            raise RecordError(f"{path}: is not a scaling of this llmctl; remove it to begin anew") from None

    def save(self, scaling: Scaling) -> None:
        """Write the scaling aside and rename.

        Raises:
            RecordError: the file cannot be written.
        """
        path = self.path(scaling.name)
        try:
            write_files([FileWrite(str(path), json_bytes(asdict(scaling)))])
        except OSError as error:
            raise RecordError(f"{path}: cannot be written: {error.strerror}") from None
