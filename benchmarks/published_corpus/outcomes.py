"""Outcome of one script: imported after so many answers, or the reason of its refusal."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import FrameType

from benchmarks.published_corpus.trials import Trials
from llmctl.errors import UsageError
from llmctl.scripts.import_script import import_script

IMPORTED, REFUSED, CRASHED, SILENT = "imported", "refused", "crashed", "lost a file"
MOST_ANSWERS = 24
_LIMIT_S = 20
_QUESTION = re.compile(r"--arg (?!NAME=)([\w-]+)=VALUE")
_CHOICE = re.compile(r"--arg (\w+)=(\w+) trains this script")
_VALUES = re.compile(r"beside the script one of ([^,\s]+)|=VALUE, such as (.+)")
_SKIPPED_FILE = re.compile(r"^#\s+(?:source|\.) (\S+)", re.MULTILINE)
_A_PATH = re.compile(
    r"path|dir|file|data|home|root|prefix|tokenizer|vocab|merge|ckpt|check|save|load|log|name|job|wandb|entity|user"
    r"|host|addr|env|venv|suffix|tag|config",
    re.IGNORECASE,
)


_A_NUMBER = re.compile(r"hosts|nodes|num|size|per_|world|interval", re.IGNORECASE)
_LENGTHS = (
    (re.compile(r"warmup", re.IGNORECASE), "1"),
    (re.compile(r"\d --\S*token(?!iz)"), "100000000"),  # An argument, which may count billions.
    (re.compile(r"token(?!iz)", re.IGNORECASE), "1000000000000"),
    (re.compile(r"iter|step|(?<!weight.)decay|samples", re.IGNORECASE), "10000000"),
)
"""A number that is large enough, or of steps before others small enough, by words of a variable or flag."""
_ZERO, _LARGER = re.compile(r"(--[\w-]+) .*: '0' is not valid"), "1024"
_CONDITION = re.compile(r"depends on a condition .*in line (\d+) that")
_COMPARED = re.compile(r"(?:-eq|==?)\s+[\"']?([\w.+-]+)")
_ASKED_GROUPS = re.compile(r"--(\w+)-weighted-split-paths-path: reads (\S+), which is not (?:beside|on) th")
_ASKED_PARAMETERS = re.compile(r"reads (\S+), which is not beside the script: the flags")
_TELLS_OF_FILES = re.compile(r"and put the file there|for the place of this file")
_SEVERAL = re.compile(r"args|params|options|flags", re.IGNORECASE)
_BACKEND = re.compile(r"backend", re.IGNORECASE)
_STRAY_WORD = "takes one value, not 2"
"""Of a flag that an answer follows, where the script has further flags or nothing."""
_GROUPS = re.compile(r"--\w+-weighted-split-paths: ")
_A_PLACE = re.compile(r"--[\w-]*(path|dir|file|save|load|model): |reads ")


@dataclass(frozen=True)
class Outcome:
    """Result of an import.

    Attributes:
        kind: IMPORTED, REFUSED, CRASHED or SILENT (imported, but without a file that lies beside the script).
        reason: of a refusal or a crash, without file and line.
        given: the answers to the script's questions, with which its training can be tried.
        files: number of files that the script asks for, and that were made up.
        rounds: number of calls that ended with questions.
        message: the whole message of a refusal.
        trial: trials.TRAINS, the reason why the ten steps were not made, or empty if they were not tried.
    """

    kind: str
    reason: str = ""
    given: tuple[tuple[str, str], ...] = ()
    files: int = 0
    rounds: int = 0
    message: str = ""
    trial: str = ""


def outcome_of(path: Path, now: datetime, folder: Path | None = None) -> Outcome:
    """Import a script and answer its questions; an answer that is refused is replaced by one of another kind.

    Args:
        path: of the script.
        now: the time of the import.
        folder: for the files that the script asks for; None to make none.
    """
    given, flags = dict[str, str](), dict[str, str]()
    rounds, files, text = 0, 0, path.read_text(encoding="utf-8", errors="replace")
    is_told = False  # The questions so far told that a file has to be put somewhere.
    while True:
        found = replace(_import(path, given, now), rounds=rounds, files=files)
        places = _texts_asked_for(path, found.message)
        if folder is not None and places and not files:
            given = _with_files(given, places, folder)
            files, rounds = len(places), rounds + (not is_told)
            continue
        is_told = is_told or _TELLS_OF_FILES.search(found.message) is not None
        names = [name for name in _QUESTION.findall(found.message) if name not in given]
        choices = {name: value for name, value in _CHOICE.findall(found.message) if name not in given}
        if found.kind == REFUSED and (names or choices) and len(given) + len(names) <= MOST_ANSWERS:
            questions = {name: _question_of(name, found.message) for name in names}
            flags |= {name: question.partition(": ")[0] for name, question in questions.items()}
            given |= choices | {name: answers_to(name, asked, text)[0] for name, asked in questions.items()}
            rounds += 1
            continue
        if found.kind == REFUSED and not names:
            found = replace(_with_larger_answers(path, found, flags, now), rounds=rounds, files=files)
        if found.kind == REFUSED and not names:
            found = replace(_with_other_answers(path, found, now) or found, rounds=rounds, files=files)
            if _QUESTION.search(found.reason) and len(found.given) < MOST_ANSWERS and dict(found.given) != given:
                given = dict(found.given)
                continue
        return found


def _with_larger_answers(path: Path, found: Outcome, flags: dict[str, str], now: datetime) -> Outcome:
    """The import with all arguments before the last one, or a larger number where one that was divided became 0."""
    given = dict(found.given)
    zero = _ZERO.match(found.reason)
    larger = {name: _LARGER for name, flag in flags.items() if zero is not None and flag == zero[1]}
    for others in (_without_gaps(given), given | larger, _without_gaps(given | larger)):
        tried = _import(path, others, now) if others != given else found
        if tried.kind == IMPORTED:
            return tried
    return found


def _without_gaps(given: dict[str, str]) -> dict[str, str]:
    """The answers with all arguments before the last that was asked for."""
    last = max((int(name) for name in given if name.isdigit()), default=0)
    return {str(place): "1" for place in range(1, last)} | given


def _texts_asked_for(path: Path, message: str) -> dict[str, str]:
    """Place -> text of files that a refusal asks for: groups of a blend, or parameters whose template is published."""
    found = {place: f'"{split}: 1 0:1 /data/{split}"' for split, place in _ASKED_GROUPS.findall(message)}
    for place in _ASKED_PARAMETERS.findall(message):
        templates = list(path.parent.parent.glob(f"*template*/{Path(place).name}"))
        if len(templates) == 1:
            found[place] = templates[0].read_text(encoding="utf-8")
    return found


def _with_files(given: dict[str, str], places: dict[str, str], folder: Path) -> dict[str, str]:
    """The answers with folders below ``folder``, in which the files lie that the script asks for."""
    moved = dict(given)
    for place, text in places.items():
        for name, value in given.items():
            if value.startswith("/") and place.startswith(value):
                moved[name] = f"{folder}{value}"
                file = Path(f"{folder}{place}")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    return moved


def trains_nothing(outcome: Outcome) -> bool:
    """True for a script that is refused for this alone: it converts or evaluates."""
    lines = outcome.message.splitlines()
    return outcome.kind == REFUSED and bool(lines) and all("trains nothing" in line for line in lines)


def _question_of(name: str, message: str) -> str:
    """The line of a message that asks for a variable, from its flag on."""
    line = next(line for line in message.splitlines() if f"--arg {name}=" in line)
    return re.sub(r"^(script|also)?(, |: )?(line \d+)?(: )?", "", line)


def _with_other_answers(path: Path, found: Outcome, now: datetime) -> Outcome | None:
    """The first import that gets further with other answers to the questions that a refusal blames."""
    given = dict(found.given)
    # The last first: flags that a variable may hold stand behind those of the script.
    blamed = [name for name, value in reversed(given.items()) if _is_blamed(value, found.reason)]
    for names in [*([name] for name in blamed), blamed]:
        for kind in range(3):
            others = {name: answers_to(name)[kind % len(answers_to(name))] for name in names}
            tried = _import(path, {**given, **others}, now)
            if tried.kind != REFUSED or not any(_is_blamed(given[name], tried.reason) for name in blamed):
                return tried
    return None


def _is_blamed(answer: str, reason: str) -> bool:
    if _STRAY_WORD in reason:
        return answer == "1"
    return "/PATH" in reason if answer.startswith("/") else f"'{answer}'" in reason


def _import(path: Path, given: dict[str, str], now: datetime) -> Outcome:
    answers = tuple(given.items())
    try:
        with _limit(_LIMIT_S):
            text = import_script(path, "script", given, now).text
    except UsageError as error:
        return Outcome(REFUSED, reason_of(str(error)), answers, message=str(error))
    except Exception as error:
        return Outcome(CRASHED, f"{type(error).__name__}: {str(error)[:80]}", answers)
    if any((path.parent / name).is_file() for name in _SKIPPED_FILE.findall(text)):
        return Outcome(SILENT, "a file beside the script is not read", answers)
    return Outcome(IMPORTED, "", answers)


def answers_to(name: str, question: str = "", script: str = "") -> tuple[str, ...]:
    """Values for a variable, the kind first that its name, the question's flag or the script's condition suggests."""
    named = _VALUES.search(question)
    if named is not None:
        return (named[1] or named[2],)
    if _SEVERAL.search(name):  # Whole flags; the part of a flag that is asked for is one of them.
        flag = re.match(r"--[\w-]+", question)
        return (
            f"{flag[0]} {answers_to(flag[0][2:], question)[0]}" if flag and flag[0] != question else "",
            "--mock-data",
        )
    if _GROUPS.match(question):
        return (f'"{name}: 1 0:1 /data/{name.lower()}"',)
    if _BACKEND.search(name):
        return ("auto",)
    condition = _CONDITION.search(question)
    compared = _COMPARED.search(script.splitlines()[int(condition[1]) - 1]) if condition and script else None
    if compared is not None:
        return (compared[1],)
    words = f"{name} {question.partition(': ')[0]}" if question.startswith("--") else name
    path, number = f"/data/{name.lower()}", next((one for kind, one in _LENGTHS if kind.search(words)), "1")
    is_path = (_A_PATH.search(name) and not _A_NUMBER.search(name)) or _A_PLACE.match(question)
    return (path, number, "") if is_path else (number, path, "")


def reason_of(message: str) -> str:
    """A message without file, line, numbers and names of one script alone."""
    text = re.sub(r"^script(, line \d+)?: ", "", message)
    text = text.partition("\nalso: ")[0]
    text = re.sub(r" \(usage:.*", "", text, flags=re.IGNORECASE | re.DOTALL)
    text = re.sub(r"(?<=line )\d+|(?<=lines )\d+", "N", text)
    return re.sub(r"(/[\w.$-]+){2,}", "/PATH", text)


def tried(outcome: Outcome, path: Path, now: datetime, trials: Trials) -> Outcome:
    """The outcome with the result of ten steps, if the script was imported."""
    if outcome.kind != IMPORTED:
        return outcome
    found = import_script(path, "script", dict(outcome.given), now)
    return replace(outcome, trial=trials.outcome_of(found.sections))


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """End the block with TimeoutError after a time, where signals are available."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
