"""Manifests that cannot be read are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.data.errors import DataError
from trainer.data.indexed.manifest import read_manifest


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot be read as a manifest"),
        (b"\xff\xfe", "cannot be read as a manifest"),
        (b'{"schema": 2', "cannot be read as a manifest"),
        (b"[" * 100_000, "cannot be read as a manifest"),
        (b"[]", "is not a manifest of schema 1 or 2"),
        (b'{"schema": 2}', "is not a manifest of schema 1 or 2"),
        (b'{"schema": 2, "tokens": "many"}', "is not a manifest of schema 1 or 2"),
    ],
)
def test_invalid_manifests_are_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "d.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"/d\.json: {says}"):
        read_manifest(tmp_path / "d")


def test_a_missing_manifest_is_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path / "d") is None
