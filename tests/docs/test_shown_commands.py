"""Every command that a page shows exists, with its flags."""

from pathlib import Path

import pytest

from tests.docs.command_tree import problem_of
from tests.docs.shown_commands import ROOT, Shown, commands_in_text, commands_of

# The pages on decisions name commands that were refused.
# Pages of the reference are made from the commands themselves.
PAGES = [
    ROOT / "README.md",
    *(
        page
        for page in sorted((ROOT / "docs").glob("*/*.md"))
        if "decisions" not in page.stem and page.parent.name != "reference"
    ),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_commands_of_blocks_exist(page: Path) -> None:
    wrong = [(shown.place, problem_of(shown.words)) for shown in commands_of(page)]
    assert [each for each in wrong if each[1]] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_commands_in_the_text_exist(page: Path) -> None:
    wrong = [(shown.place, problem_of(shown.words, is_whole=False)) for shown in commands_in_text(page)]
    assert [each for each in wrong if each[1]] == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("llmctl submt", "there is no command submt"),
        ("llmctl runs drop", "runs has no command drop"),
        ("llmctl status --al", "No such option"),
        ("llmctl generate mine --promt x", "--promt"),
        ("llmctl checkpoint import HF_DIR", "--output"),
        ("make tests", "no target tests"),
        ("pip install '.[training]'", "no extra training"),
        ("python -m trainers generate", "no such program"),
    ],
)
def test_a_wrong_command_is_found(line: str, problem: str) -> None:
    found = problem_of(Shown(ROOT / "README.md", 1, line).words)
    assert found is not None and problem in found


def test_a_comment_before_a_block_says_what_its_lines_need() -> None:
    text = (
        "<!-- needs: a cluster -->\n\n    llmctl nodes\n\ntext\n\n    llmctl status  # all\n\n"
        "<!-- needs: a GPU: smi -->\n\n    llmctl list\n    llmctl interactive -- nvidia-smi\n"
    )
    page = ROOT / "README.md"
    found = [(shown.number, shown.words[1], shown.needs) for shown in commands_of(page, text)]
    assert found == [(3, "nodes", "a cluster"), (7, "status", ""), (11, "list", ""), (12, "interactive", "a GPU")]
