"""The measured hardware of each cluster, kept on this machine; and the run that measures it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from llmctl.context import Context
from llmctl.errors import RecordError
from llmctl.paths import CLUSTER_NAME, UserFolders
from llmctl.runs.record import check_types, json_bytes, parse_json
from llmctl.transport.file_writes import FileWrite, write_files
from trainer.config.records.measured_hardware import SCHEMA, HardwareDocument

_NUMBER = (int, float)
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("date", "cluster", "run_id", "device", "torch", "backend"), (str,)),
    **dict.fromkeys(("nodes", "devices_per_node"), (int,)),
    **dict.fromkeys(("hosts", "measurements"), (list,)),
    "cuda": (str, type(None)),
    "device_memory_bytes": (int, type(None)),
}
_MEASUREMENT_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("what", "dtype", "group", "slowest_host"), (str,)),
    **dict.fromkeys(("work", "seconds", "rate", "slowest_seconds"), _NUMBER),
    **dict.fromkeys(("ranks", "repetitions"), (int,)),
    "shape": (list,),
    "bytes": (int, type(None)),
}


def measured_hardware(context: Context, cluster_name: str) -> HardwareDocument | None:
    """The newest measurement of a cluster by ``llmctl env bench``; None without one of this version's format.

    Reads one file of this machine.

    Raises:
        RecordError: the file is damaged.
    """
    path = measured_file(context.folders, cluster_name)
    text = _read(path) if CLUSTER_NAME.fullmatch(cluster_name) else None
    return None if text is None else parse_hardware(path, text)


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


def keep_hardware(context: Context, document: HardwareDocument) -> Path:
    """Keep a measurement as its cluster's newest; returns the file.

    Raises:
        RecordError: the file cannot be written.
    """
    path = measured_file(context.folders, document["cluster"])
    _write(path, document)
    return path


def measured_file(folders: UserFolders, cluster: str) -> Path:
    """The file of a cluster's newest measurement."""
    return folders.state / "hardware" / f"{cluster}.json"


def remember_run(context: Context, cluster: str, run_id: str, request: Mapping[str, Any]) -> None:
    """Remember the run that measures a cluster, before it is submitted.

    Raises:
        RecordError: the file cannot be written.
    """
    _write(_run_file(context.folders, cluster), {"run_id": run_id, "request": dict(request)})


def remembered_run(context: Context, cluster: str, request: Mapping[str, Any]) -> str | None:
    """The id of the newest run that was to measure a cluster by the same request; None without one."""
    path = _run_file(context.folders, cluster)
    text = _read(path)
    try:
        values = parse_json(path, text) if text is not None else {}
    except RecordError:
        return None
    run_id = values.get("run_id")
    return run_id if isinstance(run_id, str) and values.get("request") == dict(request) else None


def _run_file(folders: UserFolders, cluster: str) -> Path:
    # No cluster has a dot in its name.
    return folders.state / "hardware" / f"{cluster}.run.json"


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None


def _write(path: Path, values: Mapping[str, Any]) -> None:
    try:
        write_files([FileWrite(str(path), json_bytes(values))])
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}; make it writable, or make room") from None
