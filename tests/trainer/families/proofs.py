"""Table of the families and their proofs in docs/guide/models.md, written by the tests that prove them.

FAMILY_PROOFS=FILE pytest ...            tests append what they have proved
python -m tests.trainer.families.proofs FILE    writes the table
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.trainer.parity.parity_case import Case
from trainer.families.catalogue import FAMILIES

PAGE = Path(__file__).resolve().parents[3] / "docs/guide/models.md"
BEGIN, END = "<!-- proofs -->", "<!-- end of proofs -->"
COLUMNS: Mapping[str, str] = {
    "bits": "import, export",
    "transformers": "logits, loss, gradients",
    "start": "first loss within 1e-5, no model section",
    "text": "greedy text",
    "layout": "layouts beside the serial run",
    "weights": "published weights",
}


def record(family: str, proof: str, what: str = "yes") -> None:
    """Note a proof of a family; call it at the end of the test.

    Args:
        family: name of the family.
        proof: one of COLUMNS.
        what: content of the table's cell; several are joined.
    """
    path = os.environ.get("FAMILY_PROOFS")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps([family, proof, what]) + "\n")


def record_layout(family: str, case: Case) -> None:
    """Note that a family trains in the layout of a parity case as on one rank."""
    record(family, "layout", str(case).removeprefix(f"{case.model} ").removesuffix(" micro_batches=2"))


def table(proofs: Sequence[Sequence[str]]) -> list[str]:
    """Lines of the table: one row for each family."""
    lines = [f"| family | {' | '.join(COLUMNS.values())} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for family in FAMILIES:
        cells = []
        for proof in COLUMNS:
            found = sorted({what for name, kind, what in proofs if (name, kind) == (family.name, proof)})
            cells.append("; ".join(found) or "no")
        lines.append(f"| {family.name} | {' | '.join(cells)} |")
    return lines


def rows_of_page() -> list[str]:
    """Names of the families in the page's table."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    lines = rest.partition(END)[0].strip().splitlines()
    return [line.split("|")[1].strip() for line in lines[2:]]


def main(file: str) -> None:
    """Write the table of recorded proofs into the page."""
    proofs = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + "\n".join([BEGIN, "", *table(proofs), "", END]) + after, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
