"""The measured hardware of a cluster, as the planner takes it. ``llmctl env bench`` measures and keeps it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from llmctl.errors import RecordError
from llmctl.paths import CLUSTER_NAME, UserFolders
from llmctl.runs.record import check_types, parse_json
from trainer.config.records.measured_hardware import SCHEMA, HardwareDocument
from trainer.planning.estimate.measured_device import is_of, measured_device

if TYPE_CHECKING:
    from trainer.planning.estimate.devices import Device

_NUMBER = (int, float)
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("date", "cluster", "run_id", "device", "torch", "backend"), (str,)),
    **dict.fromkeys(("nodes", "devices_per_node"), (int,)),
    **dict.fromkeys(("hosts", "measurements"), (list,)),
}
_MEASUREMENT_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("what", "dtype", "group", "slowest_host"), (str,)),
    **dict.fromkeys(("work", "seconds", "rate", "slowest_seconds"), _NUMBER),
    **dict.fromkeys(("ranks", "repetitions"), (int,)),
    "shape": (list,),
    "bytes": (int, type(None)),
}


def measured_hardware(folders: UserFolders, cluster: str) -> HardwareDocument | None:
    """The newest measurement of a cluster; None without one of this version's format.

    Raises:
        RecordError: the file is damaged.
    """
    path = measured_file(folders, cluster)
    text = read_file(path) if CLUSTER_NAME.fullmatch(cluster) else None
    return None if text is None else parse_hardware(path, text)


def with_measured_speeds(
    folders: UserFolders, cluster: str, device: "Device"
) -> "tuple[Device, HardwareDocument | None]":
    """A cluster's device with its measured speeds, and the measurement; None: there is none of such a device.

    Raises:
        RecordError: the file is damaged.
    """
    document = measured_hardware(folders, cluster)
    if document is None or not is_of(device, document):
        return device, None
    return measured_device(device, document), document


def measured_file(folders: UserFolders, cluster: str) -> Path:
    """The file of a cluster's newest measurement."""
    return folders.state / "hardware" / f"{cluster}.json"


def read_file(path: Path) -> bytes | None:
    """The content of a file; None: it is not there.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None


def parse_hardware(path: str | Path, text: bytes) -> HardwareDocument | None:
    """Parse a document; None for one of another version.

    Raises:
        RecordError: the document is damaged.
    """
    values = parse_json(path, text)
    if values.get("schema") != SCHEMA:
        return None
    try:
        check_types(values, _TYPES)
        for one in values["measurements"]:
            check_types(one, _MEASUREMENT_TYPES)
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path}: is damaged: {error}; llmctl env bench --again measures again") from None
    return cast("HardwareDocument", values)
