"""The calibration of a cluster: factors of the planner that measured runs gave, kept in a file of the user's."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.errors import UsageError
from llmctl.paths import UserFolders
from llmctl.submit.preview.hardware import with_measured_speeds
from llmctl.transport.file_writes import FileWrite, make_folder, write_files
from trainer.config.records.measured_hardware import HardwareDocument
from trainer.planning.estimate.calibration import Factors

if TYPE_CHECKING:
    from trainer.planning.estimate.devices import Device

_SCHEMA = 1


@dataclass(frozen=True)
class CalibratedRun:
    """A run of a calibration.

    Attributes:
        run_id: of the run.
        name: of the run.
        layout: in words.
        measured_s: median time of a step.
        before_s: predicted without calibration.
        after_s: predicted with it.
        measured_bytes: highest peak memory of a rank; None: unknown.
        after_bytes: predicted with calibration.
    """

    run_id: str
    name: str
    layout: str
    measured_s: float
    before_s: float
    after_s: float
    measured_bytes: int | None
    after_bytes: int


@dataclass(frozen=True)
class Calibration:
    """Factors for the runs of one cluster.

    Attributes:
        cluster: name of its profile.
        device: name of its device.
        time: when it was made, in seconds since 1970.
        factors: of the planner's terms.
        runs: behind it.
        hardware: run of ``llmctl env bench`` whose speeds the factors are for; None: those of the data sheet.
        schema: version of the file.
    """

    cluster: str
    device: str
    time: float
    factors: Factors
    runs: tuple[CalibratedRun, ...]
    hardware: str | None = None
    schema: int = _SCHEMA

    def as_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def calibration_file(folders: UserFolders, cluster: str) -> Path:
    """The file of a cluster's calibration."""
    return folders.state / "calibrations" / f"{cluster}.json"


def write_calibration(folders: UserFolders, calibration: Calibration) -> Path:
    """Write the file of a cluster's calibration.

    Raises:
        UsageError: it cannot be written.
    """
    path = calibration_file(folders, calibration.cluster)
    try:
        make_folder(str(path.parent), mode=0o700)
        write_files([FileWrite(str(path), json.dumps(calibration.as_json(), indent=1).encode())])
    except OSError as error:
        raise UsageError(f"{path}: the calibration cannot be written: {error.strerror}; free the place") from None
    return path


def read_calibration(folders: UserFolders, cluster: str) -> Calibration | None:
    """The calibration of a cluster; None: there is none.

    Raises:
        UsageError: the file is damaged.
    """
    path = calibration_file(folders, cluster)
    try:
        values = json.loads(path.read_bytes())
        return _calibration_of(values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{path}: is not a calibration ({type(error).__name__}); remove it, or make it again: llmctl plan "
            f"--calibrate --cluster {cluster}"
        ) from None


@dataclass(frozen=True)
class KnownDevice:
    """A cluster's device, with all that is known of its speed.

    Attributes:
        device: with measured speeds and the factors of the calibration.
        hardware: the measurement; None: the speeds are those of the data sheet.
        calibration: None: there is none for this device and these speeds.
    """

    device: "Device"
    hardware: HardwareDocument | None = None
    calibration: Calibration | None = None


def known_device(folders: UserFolders, cluster: str, device: "Device") -> KnownDevice:
    """A cluster's device as measured by ``llmctl env bench``, with the factors of ``llmctl plan --calibrate``.

    Factors that were fitted to other speeds than those now known do not count.

    Raises:
        UsageError, RecordError: a file is damaged.
    """
    measured, hardware = with_measured_speeds(folders, cluster, device)
    found = read_calibration(folders, cluster)
    run_id = None if hardware is None else hardware["run_id"]
    if found is None or (found.device, found.hardware) != (device.name, run_id):
        return KnownDevice(measured, hardware)
    return KnownDevice(found.factors.of(measured), hardware, found)


def _calibration_of(values: Mapping[str, Any]) -> Calibration:
    if values["schema"] != _SCHEMA:
        raise ValueError(f"schema {values['schema']}")
    factors = Factors(**values["factors"])
    if not all(value is None or 0 <= value < 1e6 for value in asdict(factors).values()):
        raise ValueError("a factor is out of range")
    runs = tuple(CalibratedRun(**run) for run in values["runs"])
    hardware = values.get("hardware")
    if hardware is not None and not isinstance(hardware, str):
        raise TypeError("hardware")
    return Calibration(str(values["cluster"]), str(values["device"]), float(values["time"]), factors, runs, hardware)
