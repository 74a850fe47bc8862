"""Import a corpus of published scripts, and write the table: ``python -m benchmarks.published_corpus FOLDER``."""

from __future__ import annotations

import argparse
import tempfile
from datetime import datetime
from pathlib import Path

from benchmarks.published_corpus.outcomes import Outcome, outcome_of, tried
from benchmarks.published_corpus.table import Row, page_of
from benchmarks.published_corpus.texts import Published, commits_of, model_configs_of, scripts_of
from benchmarks.published_corpus.trials import Trials
from llmctl import __version__

RESULT = Path(__file__).resolve().parents[1] / "results/published_corpus.md"


def _outcome(script: Published, now: datetime, trials: Trials | None, folder: Path) -> Outcome:
    outcome = outcome_of(script.path, now, folder)
    return outcome if trials is None else tried(outcome, script.path, now, trials)


def main() -> None:
    """Import, and write or print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_corpus", description=__doc__)
    parser.add_argument("folder", type=Path, help="one folder per repository, named OWNER+NAME")
    parser.add_argument("--to", type=Path, default=RESULT, help="page to write (default: %(default)s)")
    parser.add_argument("--train", action="store_true", help="make ten steps of every imported config (20 minutes)")
    arguments = parser.parse_args()
    now = datetime.now()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        trials = Trials(Path(folder)) if arguments.train else None
        scripts = [Row(one, _outcome(one, now, trials, made)) for one in scripts_of(arguments.folder)]
        configs = [Row(one, _outcome(one, now, trials, made)) for one in model_configs_of(arguments.folder)]
    head = f"llmctl {__version__}, {now:%Y-%m-%d}: `python -m benchmarks.published_corpus FOLDER`."
    lines = page_of(scripts, configs, commits_of(arguments.folder), head)
    arguments.to.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
