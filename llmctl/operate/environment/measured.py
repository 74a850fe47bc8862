"""Keep the measured hardware of each cluster on this machine, and remember the run that measures it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmctl.context import Context
from llmctl.errors import RecordError
from llmctl.paths import UserFolders
from llmctl.runs.record import json_bytes, parse_json
from llmctl.submit.preview.hardware import measured_file, read_file
from llmctl.transport.file_writes import FileWrite, write_files
from trainer.config.records.measured_hardware import HardwareDocument


def keep_hardware(context: Context, document: HardwareDocument) -> Path:
    """Keep a measurement as its cluster's newest; returns the file.

    Raises:
        RecordError: the file cannot be written.
    """
    path = measured_file(context.folders, document["cluster"])
    _write(path, document)
    return path


def remember_run(context: Context, cluster: str, run_id: str, request: Mapping[str, Any]) -> None:
    """Remember the run that measures a cluster, before it is submitted.

    Raises:
        RecordError: the file cannot be written.
    """
    _write(_run_file(context.folders, cluster), {"run_id": run_id, "request": dict(request)})


def remembered_run(context: Context, cluster: str, request: Mapping[str, Any]) -> str | None:
    """The id of the newest run that was to measure a cluster by the same request; None without one."""
    path = _run_file(context.folders, cluster)
    text = read_file(path)
    try:
        values = parse_json(path, text) if text is not None else {}
    except RecordError:
        return None
    run_id = values.get("run_id")
    return run_id if isinstance(run_id, str) and values.get("request") == dict(request) else None


def _run_file(folders: UserFolders, cluster: str) -> Path:
    # No cluster has a dot in its name.
    return folders.state / "hardware" / f"{cluster}.run.json"


def _write(path: Path, values: Mapping[str, Any]) -> None:
    try:
        write_files([FileWrite(str(path), json_bytes(values))])
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}; make it writable, or make room") from None
