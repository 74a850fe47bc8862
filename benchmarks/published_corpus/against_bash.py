"""Compare the flags that llmctl reads with those that bash gives to the training program.

    python -m benchmarks.published_corpus.against_bash FOLDER

Every script that llmctl imports runs under bash in a sandbox, with the same variables and arguments. Writes
benchmarks/results/published_corpus_bash.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from benchmarks.published_corpus.bash_page import DIFFERENT, EQUAL, NO_TRUTH, UNKNOWN, Comparison, page_of
from benchmarks.published_corpus.bash_world import starts_of, trained, training_words, with_open_values
from benchmarks.published_corpus.outcomes import IMPORTED, Outcome, outcome_of
from benchmarks.published_corpus.same_words import Sameness, compare
from benchmarks.published_corpus.sandbox import Start, folder_in_sandbox, is_available
from benchmarks.published_corpus.texts import Published, scripts_of
from llmctl import __version__
from llmctl.scripts.import_script import import_script, launch_line_of
from llmctl.scripts.launch_line import LaunchLine
from llmctl.scripts.questions import TRAINING_LINE

RESULT = Path(__file__).resolve().parents[1] / "results/published_corpus_bash.md"
_AT_ONCE = 4
"""Sandboxes at a time."""


def compare_script(path: Path, repository: Path, given: Mapping[str, str], now: datetime) -> Comparison:
    """Compare for one script that llmctl imports.

    Args:
        path: of the script.
        repository: folder above, of which the sandbox has a copy.
        given: answers to the script's questions.
        now: the time that ``date`` prints.
    """
    script = path.read_text(encoding="utf-8", errors="replace")
    if any("-" in name and re.search(rf"--{re.escape(name)}\s+<[A-Za-z]", script) for name in given):
        return Comparison(NO_TRUTH, "bash takes a place left open, as in --vocab-file <PATH>, for a redirection")
    launch, text = launch_line_of(path, given, now), import_script(path, "script", given, now).text
    errors = ""
    for answers in (given, with_open_values(path, given, launch.arguments)):
        for start in starts_of(path, repository, answers, now):
            try:
                result, start = trained(start)
            except TimeoutError:
                return Comparison(NO_TRUTH, "the script does not end under bash")
            if commands := training_words(result):
                return _compared(launch, text, commands, start, is_chosen=TRAINING_LINE in given)
            errors = errors or result.errors
    return Comparison(NO_TRUTH, _why(errors), detail=errors[-600:])


def _compared(
    launch: LaunchLine, text: str, commands: Sequence[tuple[str, ...]], start: Start, *, is_chosen: bool
) -> Comparison:
    name = launch.entry.rpartition("/")[2]
    mine = [command for command in commands if command[1].rpartition("/")[2] == name]
    if not mine:
        return Comparison(DIFFERENT, detail=f"bash trains with {commands[0][1]}, llmctl with {launch.entry}")
    folder = folder_in_sandbox(start.folder)
    found = [compare(launch.arguments, command[2:], folder, command[0]) for command in mine]
    best = min(range(len(mine)), key=lambda place: found[place].difference is not None)
    if not is_chosen and len({one[2:] for one in mine}) > 1 and found[best].difference is None:
        return Comparison(DIFFERENT, detail="bash trains several times, with different words")
    return _comparison(found[best], mine[best][2:], text)


def _comparison(same: Sameness, received: tuple[str, ...], text: str) -> Comparison:
    lost = tuple(dict.fromkeys(word for word in received if _is_lost(word, text)))
    if same.difference is not None:
        one = same.difference
        before = " ".join(received[max(one.place - 2, 0) : one.place])
        detail = f"word {one.place} behind {before!r}: llmctl reads {one.read!r}, bash gives {one.received!r}"
        return Comparison(DIFFERENT, detail=detail, lost=lost, words=len(received))
    kind = UNKNOWN if same.unknown else EQUAL
    return Comparison(kind, lost=lost, swallowed=same.swallowed, words=len(received), unknown=same.unknown)


def _is_lost(word: str, text: str) -> bool:
    """True for a flag that the text of a config has neither by its name nor by its key."""
    name = re.fullmatch(r"--([A-Za-z][\w-]*)(=.*)?", word, re.DOTALL)
    return name is not None and re.search(rf"(?<![\w-])--{re.escape(name[1])}(?![\w-])", text) is None


def _why(errors: str) -> str:
    last = [line for line in errors.splitlines() if not line.startswith("+")]
    shown = re.sub(r"(/[\w.$~-]+){2,}", "/PATH", re.sub(r"^.*?line \d+: ", "", last[-1])) if last else ""
    return f"bash starts no training program{f': {shown[:100]}' if shown else ''}"


def main() -> None:
    """Compare, and write the page; ``--only TEXT`` prints the scripts whose path has TEXT."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_corpus.against_bash", description=__doc__)
    parser.add_argument("folder", type=Path, help="one folder per repository, named OWNER+NAME")
    parser.add_argument("--to", type=Path, default=RESULT, help="page to write (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="compare scripts with TEXT in their path, and print")
    arguments = parser.parse_args()
    if not is_available():
        parser.error("this machine gives no namespaces of a user (unshare), without which no script is run")
    now = datetime.now().replace(microsecond=0)
    scripts = [one for one in scripts_of(arguments.folder) if one.is_known and arguments.only in str(one.path)]
    imported = [(one, found) for one in scripts if (found := outcome_of(one.path, now)).kind == IMPORTED]

    def compare_one(pair: tuple[Published, Outcome]) -> tuple[str, Comparison]:
        one, outcome = pair
        place = one.path.relative_to(arguments.folder)
        found = compare_script(one.path, arguments.folder / Path(*place.parts[:2]), dict(outcome.given), now)
        if found.kind in (DIFFERENT, NO_TRUTH) or found.lost or found.swallowed or arguments.only:
            print(place, dict(outcome.given), found, sep="\n  ", flush=True)
        return one.source, found

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        rows = list(pool.map(compare_one, imported))
    head = f"llmctl {__version__}, {now:%Y-%m-%d}: `python -m benchmarks.published_corpus.against_bash FOLDER`."
    if not arguments.only:
        arguments.to.write_text("\n".join(page_of(rows, head)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
