"""Generate README's tables of the fused kernels from the newest results of each device.

    python -m benchmarks.readme_table
    python -m benchmarks.readme_table --check

The results are the JSON files that ``python -m benchmarks.kernels --write`` writes to benchmarks/results. With --check
the program writes nothing, and the exit code is 1 if README differs from the results.
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
README = ROOT / "README.md"
BEGIN = "<!-- Written by python -m benchmarks.readme_table -->"
END = "<!-- Until here -->"
_WIDTH = 150
_LARGE_BYTES = 1 << 24
"""Calls that move fewer bytes measure call overhead and are left out of README."""

Document = Mapping[str, Any]


class NoPlaceError(Exception):
    """README lacks the two lines that enclose the tables."""


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
        "The choice of `auto`: speedup over plain PyTorch for forward and backward (if any), and speed as a percentage "
        "of a memory copy, counting the minimum of bytes moved. In-place operations can exceed 100%, because they do "
        "not fetch memory only to overwrite it. `reference` is plain torch operations. All times, also of small sizes, "
        "are in `benchmarks/results`.",
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
        lines += ["", "No GPU has been measured yet."]
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
    """Table of training with and without the native kernels, and of the peers."""
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
            f"{training['rounds']} rounds, the same allocator settings unless the row says otherwise; the share is "
            f"relative to the speed of float32 matrix products, {training['matmul_gflops_per_s']:.0f} GFLOP/s:",
            _WIDTH,
        ),
        "",
        *_markdown(("trainer", "tokens/s", "of the matmul speed", "peak MiB"), rows),
    ]


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def with_tables(readme: str, lines: Sequence[str]) -> str:
    """Replace the text between BEGIN and END by these lines.

    Raises:
        NoPlaceError: the text does not contain BEGIN and END once each, in this order.
    """
    before, begin, rest = readme.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not (begin and end) or BEGIN in rest or END in after:
        raise NoPlaceError(f"README must contain one line {BEGIN!r}, followed by one line {END!r}")
    return "".join((before, begin, "\n", *(f"{line}\n" for line in lines), "\n", end, after))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file would change")
    parser.add_argument("--readme", type=Path, default=README, metavar="FILE", help="the file with the tables")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="folder of the results")
    flags = parser.parse_args(arguments)
    documents = stored_results(flags.results)
    if not documents:
        print(f"{flags.results} has no kernels-*.json; run python -m benchmarks.kernels --write", file=sys.stderr)
        return 1
    said = flags.readme.read_text(encoding="utf-8")
    try:
        right = with_tables(said, tables(documents))
    except NoPlaceError as error:
        print(f"{flags.readme}: {error}", file=sys.stderr)
        return 1
    if flags.check and said != right:
        print(f"{flags.readme} differs from the results; run python -m benchmarks.readme_table", file=sys.stderr)
        return 1
    if not flags.check:
        flags.readme.write_text(right, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
