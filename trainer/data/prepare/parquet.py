"""Texts in Parquet files, read by pyarrow, which is imported only for Parquet inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainer.data.errors import DataError

_ROWS = 64
"""Rows read at a time: a few hundred kilobytes of web pages, some megabytes of books."""


def _open(path: str) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise DataError(
            f"{path}: needs the package pyarrow; install it (pip install pyarrow), or give the text as .jsonl"
        ) from None
    import pyarrow

    try:
        # Pre-buffering would read ahead a whole row group.
        return ParquetFile(path, memory_map=True, pre_buffer=False, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).rstrip(".")
        raise DataError(
            f"{path}: cannot be read as Parquet: {reason}; it is damaged, truncated, or not Parquet: get it again, or "
            "rename it"
        ) from None


def row_group_sizes(path: str) -> list[int]:
    """Return the compressed bytes of each row group.

    Raises:
        DataError: the file cannot be read, or pyarrow is not installed.
    """
    with _open(path) as file:
        about = file.metadata
        return [
            sum(about.row_group(group).column(column).total_compressed_size for column in range(about.num_columns))
            for group in range(about.num_row_groups)
        ]


def read_rows(path: str, groups: range, keys: Sequence[str]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the rows of consecutive row groups: row number and the values of ``keys``.

    Rows are numbered in the file, from 0.

    Raises:
        DataError: the file cannot be read, or has no such column.
    """
    import pyarrow

    with _open(path) as file:
        names = file.schema_arrow.names
        missing = next((key for key in keys if key not in names), None)
        if missing is not None:
            raise DataError(
                f"{path}: has no column {missing!r}, only {', '.join(names)}; name the text columns with --json-keys"
            )
        row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
        try:
            for batch in file.iter_batches(_ROWS, row_groups=list(groups), columns=list(keys), use_threads=False):
                for values in zip(*(batch.column(key).to_pylist() for key in keys), strict=True):
                    yield row, values
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:
            which = f"{groups.start}" if len(groups) == 1 else f"{groups.start} to {groups.stop - 1}"
            raise DataError(f"{path}: row group {which} is damaged: {error}") from None
