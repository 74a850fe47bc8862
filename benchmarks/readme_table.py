"""README's tables of the fused kernels, made from the newest results of each device.

    python -m benchmarks.readme_table
    python -m benchmarks.readme_table --check

The results are the JSON files that ``python -m benchmarks.kernels --write`` leaves in benchmarks/results. With --check
nothing is written, and the exit code is 1 where README says something else than they do.
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
"""Calls that move fewer bytes take as long as it takes to call: the results have them, and README has not."""

Document = Mapping[str, Any]


class NoPlaceError(Exception):
    """README has not the two lines between which the tables stand."""


def stored_results(folder: Path) -> list[Document]:
    """All results of kernels, the newest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("kernels-*.json")]
    return sorted(found, key=lambda document: str(document["date"]), reverse=True)


def tables(documents: Sequence[Document]) -> list[str]:
    """The lines of all tables.

    Args:
        documents: results, the newest first.
    """
    lines = textwrap.wrap(
        "What `auto` takes: how many times as fast as plain PyTorch it is, forward and backward where there is one, "
        "and at which share of the speed of copying memory it moves the bytes that it has to (in place, where nothing "
        "is fetched only to be overwritten, that may be more than all of it). `reference` are torch's own operations. "
        "All "
        "times, those of small sizes too, are in `benchmarks/results`.",
        _WIDTH,
    )
    seen = set()
    for document in documents:
        for device, name in document["devices"].items():
            # Every machine has another processor, and the newest is enough; GPUs each have a table.
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
    """Operations and sizes down, dtypes across."""
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
    """Training with and without the own kernels, beside the peers."""
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
            f"{training['rounds']} rounds, one allocator setting for all but the row that says otherwise; the share is "
            f"that of the speed of float32 matrix products, {training['matmul_gflops_per_s']:.0f} GFLOP/s:",
            _WIDTH,
        ),
        "",
        *_markdown(("trainer", "tokens/s", "of the matmul speed", "peak MiB"), rows),
    ]


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def with_tables(readme: str, lines: Sequence[str]) -> str:
    """A text with these lines in the place of what stands between BEGIN and END.

    Raises:
        NoPlaceError: it has not each of the two once, in this order.
    """
    before, begin, rest = readme.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not (begin and end) or BEGIN in rest or END in after:
        raise NoPlaceError(f"there must be one line {BEGIN!r} and after it one line {END!r}")
    return "".join((before, begin, "\n", *(f"{line}\n" for line in lines), "\n", end, after))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would change something")
    parser.add_argument("--readme", type=Path, default=README, metavar="FILE", help="the file with the two lines")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the results are")
    flags = parser.parse_args(arguments)
    documents = stored_results(flags.results)
    if not documents:
        print(f"{flags.results} has no kernels-*.json; python -m benchmarks.kernels --write makes one", file=sys.stderr)
        return 1
    said = flags.readme.read_text(encoding="utf-8")
    try:
        right = with_tables(said, tables(documents))
    except NoPlaceError as error:
        print(f"{flags.readme}: {error}", file=sys.stderr)
        return 1
    if flags.check and said != right:
        print(f"{flags.readme} says something else; python -m benchmarks.readme_table writes it", file=sys.stderr)
        return 1
    if not flags.check:
        flags.readme.write_text(right, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
