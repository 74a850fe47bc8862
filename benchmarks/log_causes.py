"""The causes that llmctl reads from outputs, on gpualert-eval's corpus of labelled logs.

    git clone https://github.com/Parv-01/gpualert-eval
    python -m benchmarks.log_causes gpualert-eval [--to PAGE]

The corpus has 15 classes. Kinds without a class of their own there (a disk that is full, say) count as wrong.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from llmctl.supervisor.causes.output import LogCause, find_cause

CLASSES = {
    "gpu_memory": "cuda_oom",
    "host_memory": "ram_oom",
    "host_memory_killed": "oom_killer",
    "gpu_error": "cuda_runtime",
    "gpu_hardware": "cuda_runtime",
    "gpu_build": "runtime_error",
    "checkpoint": "runtime_error",
    "device_mismatch": "device_mismatch",
    "arithmetic": "div_zero",
    "file": "file_not_found",
    "import": "missing_module",
    "not_finite": "nan_loss",
    "communication": "nccl",
    "permission": "permission",
    "crash": "segfault",
    "assertion": "assertion",
}
"""Kind -> class of the corpus, where a RuntimeError is a class of its own."""


def class_of(cause: LogCause | None) -> str:
    """The corpus's class of a cause."""
    if cause is None:
        return "none"
    if cause.kind == "exception":
        return "runtime_error" if cause.line.startswith("RuntimeError") else "traceback"
    return CLASSES.get(cause.kind, cause.kind)


def scores(pairs: Counter[tuple[str, str]]) -> dict[str, tuple[int, float, float]]:
    """Class -> number of logs, precision, recall; of pairs (labelled, found)."""
    found: dict[str, tuple[int, float, float]] = {}
    for name in sorted({label for label, _ in pairs}):
        right = pairs[name, name]
        logs = sum(count for (label, _), count in pairs.items() if label == name)
        claimed = sum(count for (_, claim), count in pairs.items() if claim == name)
        found[name] = (logs, right / claimed if claimed else 0.0, right / logs)
    return found


def page(folder: Path) -> str:
    """The table of a corpus, as Markdown."""
    rows = [json.loads(line) for line in (folder / "corpus" / "labels.jsonl").read_text().splitlines()]
    pairs: Counter[tuple[str, str]] = Counter()
    for row in rows:
        text = (folder / row["log_path"]).read_text(errors="replace")
        pairs[row["mode"], class_of(find_cause(text))] += 1
    table = scores(pairs)
    f1 = {name: 2 * p * r / (p + r) if p + r else 0.0 for name, (_, p, r) in table.items()}
    lines = [
        "# Causes of death, read from outputs",
        "",
        f"{len(rows)} labelled logs of gpualert-eval (https://github.com/Parv-01/gpualert-eval), {len(table)} classes:",
        "`python -m benchmarks.log_causes FOLDER`.",
        "",
        f"Macro-F1 {sum(f1.values()) / len(f1):.3f}. Its authors report 0.998 for their own tool, 0.830 for key words",
        "and 0.133 for exit codes (results/exp1.md there). Most of these logs are variants of one message per class:",
        "the figure says little about other messages. More of them are in",
        "tests/llmctl/supervisor/test_causes.py.",
        "",
        "| class | logs | precision | recall | F1 |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {name} | {n} | {p:.3f} | {r:.3f} | {f1[name]:.3f} |" for name, (n, p, r) in table.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it to a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a clone of gpualert-eval")
    parser.add_argument("--to", type=Path, metavar="PAGE")
    options = parser.parse_args()
    text = page(options.folder)
    if options.to is not None:
        options.to.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
