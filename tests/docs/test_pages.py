"""The commands of each page work as they are shown, in order, in a folder with an empty home.

``make proofs`` runs all of them. In ``make test`` a training is a dry run, and the commands that read a trained model
are left out. A comment on the page (tests/docs/shown_commands.py) exempts a command that needs a cluster, a GPU, the
network or a published model.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.page_files import write_files, write_published_model
from tests.docs.page_folder import PageFolder
from tests.docs.shown_commands import ROOT, Shown, commands_of

PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs/guide").glob("*.md")))
    if any(not shown.needs for shown in commands_of(page))
]
WITH_MODEL = ("checkpoint", "env", "evaluate", "generate", "plot")
PREPARE = "llmctl data prepare corpus.jsonl --output corpus --tokenizer tokenizer.json --append-eod"
TRAIN = f"{PREPARE} && llmctl submit train.yaml --follow --name"
# Page -> commands before those of the page: in make test, and in make proofs.
BEFORE = {
    "README": ("llmctl submit --name first -- sh -c 'while echo working; do sleep 1; done'", ""),
    "config": ("", f"{TRAIN} RUN"),
    "evaluation": ("", f"{TRAIN} MODEL"),
    "generation": ("", f"{TRAIN} mine"),
    "megatron-scripts": ("rm train.yaml; llmctl clusters new NAME --scheduler slurm",) * 2,
    "models": ("", f"{TRAIN} RUN"),
    "runs-and-files": ("llmctl submit --name RUN -- sh -c 'while echo working; do sleep 1; done'",) * 2,
    "seeing-a-run": ("llmctl submit --name RUN -- echo done", f"{TRAIN} RUN"),
}
# Text of a command -> output after which the reader presses Ctrl-C.
UNTIL = {"--name first --follow": r"\n\d+/100 ", "logs first -f": "working|/100 ", "logs RUN -f": "working"}
# Text of a command -> its exit code, which the page explains.
CODES = {"--device V100-16GB": 1}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[PageFolder]:
    place = PageFolder(tmp_path)
    write_files(place.work)
    yield place
    place.end_runs()


def cheap_form(shown: Shown) -> str | None:
    """The command as ``make test`` runs it; None if a trained model is needed."""
    words = shown.words
    if words[1] in WITH_MODEL:
        return None
    trains = words[1] == "submit" and ("--" not in words or "--torchrun" in words)
    return shown.text.replace("submit", "submit --dry-run", 1) if trains else whole_form(shown)


def whole_form(shown: Shown) -> str:
    """The command as shown; a run is followed to its end, and a training has few iterations."""
    words = shown.words
    if words[1] != "submit" or "--dry-run" in words or any(text in shown.text for text in UNTIL):
        return shown.text
    flags = ["--follow"] * ("--follow" not in words) + ["--set training.train_iters=20"] * ("--" not in words)
    return shown.text.replace("submit", " ".join(["submit", *flags]), 1)


def follow(page: Path, place: PageFolder, *, whole: bool) -> None:
    """Type the commands of a page."""
    shown = [each for each in commands_of(page) if not each.needs]
    for name in ("HF_DIR", "HF_FOLDER"):
        if any(name in each.text and (whole or cheap_form(each)) for each in shown):
            write_published_model(place.work, name)
    if page.parent.name == "guide" and page.stem == "README":
        _, _, config = page.read_text().partition("    # llmctl.yaml\n")
        (place.work / "llmctl.yaml").write_text(config.partition("\n\n")[0])
    before = BEFORE.get(page.stem if page.parent == ROOT or page.stem != "README" else "", ("", ""))[whole]
    if before:
        place.type(before)
    for each in shown:
        command = whole_form(each) if whole else cheap_form(each)
        if command is not None:
            until = next((pattern for text, pattern in UNTIL.items() if text in command), "")
            code = next((code for text, code in CODES.items() if text in command), 0)
            place.type(command, "" if "--dry-run" in command else until, code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_the_cheap_commands_of_a_page_work(page: Path, place: PageFolder) -> None:
    follow(page, place, whole=False)


@pytest.mark.proof
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_all_commands_of_a_page_work(page: Path, place: PageFolder) -> None:
    follow(page, place, whole=True)
