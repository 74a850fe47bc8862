"""Inject faults into real runs, and print what was told, recovered and lost.

One command: ``python -m tests.faults``, as ``make faults`` runs it; ``--bed`` and ``--kind`` choose. Each case is one
line of JSON in the journal: an interrupted call goes on where it was, and cases that are in the journal are not
repeated. Remove the journal to begin again.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from tests.faults.beds import OPENED, clean_environment, lack_of
from tests.faults.kinds import BEDS, BY_NAME, KINDS
from tests.faults.page import page, table
from tests.faults.trial import Result, Trial

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks/results/faults.md"
JOURNAL = PAGE.with_suffix(".jsonl")


def main():
    """Run the cases that are missing; 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", choices=BEDS, action="append", help="one of the beds; repeatable (all)")
    parser.add_argument("--kind", choices=list(BY_NAME), action="append", help="one of the kinds; repeatable (all)")
    parser.add_argument("--times", type=int, default=5, help="cases of each kind on each bed (5)")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="results, one line of JSON each")
    parser.add_argument("--page", type=Path, default=PAGE, help="Markdown page to write")
    options = parser.parse_args()
    clean_environment()
    # A shell in the background ignores SIGINT; an end by SIGTERM would leave the test beds' files.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kinds = [BY_NAME[name] for name in options.kind or BY_NAME]
    lacks = {}
    for name in options.bed or BEDS:
        lacks[name] = lack_of(name)
        wanted = [(kind, number) for kind in kinds if name in kind.beds for number in range(1, options.times + 1)]
        known = {(one.kind, one.number) for one in read(options.journal) if one.bed == name}
        missing = [(kind, number) for kind, number in wanted if (kind.name, number) not in known]
        if missing and not lacks[name]:
            run_on(name, missing, options.journal)
    results = read(options.journal)
    print("\n".join(table(results, KINDS)))
    options.page.write_text(page(results, KINDS, lacks))
    return 0 if all(one.is_good for one in results) else 1


def run_on(name, cases, journal):
    """Run cases on a bed, and append their results to the journal."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    with OPENED[name]() as bed:
        bed.losses()
        for kind, number in cases:
            try:
                result = Trial(bed, kind, number).run()
            except (AssertionError, OSError, ValueError) as problem:
                words = f"no end: {str(problem)[:1000]}"
                result = Result(kind.name, name, number, None, False, False, 0, (words,), "")
            with journal.open("a") as file:
                file.write(result.line() + "\n")
            print(result.line(), flush=True)


def read(journal):
    """Results in the journal."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [Result(**{**values, "wrong": tuple(values["wrong"])}) for values in map(json.loads, lines)]


if __name__ == "__main__":
    sys.exit(main())
