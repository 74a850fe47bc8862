"""Tables of docs/guide/benchmarks.md, made from the newest results of each device.

    python -m benchmarks.results_table
    python -m benchmarks.results_table --check

The results are the JSON files that ``python -m benchmarks.kernels --write`` leaves in benchmarks/results. With --check
nothing is written, and the exit code is 1 if the page differs from the results.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "guide" / "benchmarks.md"
BEGIN = "<!-- Written by python -m benchmarks.results_table -->"
END = "<!-- Until here -->"
_WIDTH = 150
_LARGE_BYTES = 1 << 24
"""The overhead of a call dominates calls that move fewer bytes: the results have them, the page leaves them out."""

Document = Mapping[str, Any]


class NoPlaceError(Exception):
    """The page lacks one of the two lines between which the tables stand."""


def stored_results(folder: Path) -> list[Document]:
    """All results of kernels, newest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("kernels-*.json")]
    return sorted(found, key=lambda document: str(document["date"]), reverse=True)


def tables(documents: Sequence[Document]) -> list[str]:
    """Lines of all tables.

    Args:
        documents: results, newest first.
    """
    lines = textwrap.wrap(
        "Each cell names the backend that `auto` takes, its speed as a multiple of plain PyTorch, and its bandwidth as "
        "a share of the bandwidth of a memory copy. The speed is that of forward and backward where the op has a "
        "backward. The bandwidth counts the bytes that the op must move. An op that works in place can exceed 100%, "
        "because its writes need no fetch first. `reference` means plain torch operations. `benchmarks/results` has "
        "all times, also those of small sizes.",
        _WIDTH,
    )
    seen = set()
    for document in documents:
        for device, name in document["devices"].items():
            # Only the newest result of a CPU, but one table for each GPU.
            key = "cpu" if device == "cpu" else name
            if key not in seen:
                seen.add(key)
                lines += ["", *_device_table(document, device)]
    if seen <= {"cpu"}:
        lines += ["", "This table is of CPUs."]
    trained = next((document for document in documents if document.get("training")), None)
    if trained is not None:
        lines += ["", *_training_table(trained)]
    return lines


def _device_table(document: Document, device: str) -> list[str]:
    """Table of operations and sizes by dtypes."""
    alone = [{**row, "operation": f"{row['operation']}, forward"} for row in document.get("forward", [])]
    rows = [row for row in (*document["measurements"], *alone) if row["device"] == device and row["is_chosen"]]
    rows = [row for row in rows if 1e9 * row["gb_per_s"] * row["seconds"] >= _LARGE_BYTES]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        figures = f"{row['backend']} {row['of_plain']:.1f}x, {row['of_copy']:.0%}"
        cells.setdefault((row["operation"], row["size"]), {})[row["dtype"]] = figures
    what = f"{document['threads']} thread{'s' if document['threads'] > 1 else ''}"
    if device != "cpu":
        what = f"CUDA {document['cuda']}, driver {document['driver'] or 'unknown'}"
    return [
        *textwrap.wrap(
            f"{document['devices'][device]}, {what}, {document['date']}, torch {document['torch']}, "
            f"{document['compiler']}; a copy moves {document['copy_gb_per_s'][device]:.0f} GB/s:",
            _WIDTH,
        ),
        "",
        *_markdown(
            ("operation", "size", *dtypes),
            [(*key, *(found.get(dtype, "") for dtype in dtypes)) for key, found in cells.items()],
        ),
    ]


def _training_table(document: Document) -> list[str]:
    """Training with and without the native kernels, beside the peers."""
    training = document["training"]
    rows = [
        (
            name,
            f"{found['tokens_per_s']:,.0f}",
            f"{found['of_matmul_speed']:.1%}",
            f"{found['peak_mib']:,.0f}",
        )
        for name, found in training["trainers"].items()
    ]
    return [
        *textwrap.wrap(
            f"Training the model `{training['model']}` on one thread, {document['date']}, medians of "
            f"{training['rounds']} rounds. All rows use the same allocator settings unless the row says otherwise. The "
            f"share compares with the speed of float32 matrix products, {training['matmul_gflops_per_s']:.0f} GFLOP/s:",
            _WIDTH,
        ),
        "",
        *_markdown(("trainer", "tokens/s", "of the matmul speed", "peak MiB"), rows),
    ]


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def with_tables(page: str, lines: Sequence[str]) -> str:
    """A page whose text between BEGIN and END is replaced by these lines.

    Raises:
        NoPlaceError: the page does not have each of the two lines once, in this order.
    """
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not (begin and end) or BEGIN in rest or END in after:
        raise NoPlaceError(f"README must contain one line {BEGIN!r}, followed by one line {END!r}")
    return "".join((before, begin, "\n", *(f"{line}\n" for line in lines), "\n", end, after))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page would change")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="the file with the two lines")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="folder of the results")
    flags = parser.parse_args(arguments)
    documents = stored_results(flags.results)
    if not documents:
        print(f"{flags.results} has no kernels-*.json; run python -m benchmarks.kernels --write", file=sys.stderr)
        return 1
    old = flags.page.read_text(encoding="utf-8")
    try:
        new = with_tables(old, tables(documents))
    except NoPlaceError as error:
        print(f"{flags.page}: {error}", file=sys.stderr)
        return 1
    if flags.check and old != new:
        print(f"{flags.page} differs from the results; python -m benchmarks.results_table writes it", file=sys.stderr)
        return 1
    if not flags.check:
        flags.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
