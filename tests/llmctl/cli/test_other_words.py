"""Words of other programs on the command line: each is answered by the word that llmctl has for it."""

import re

import pytest

from llmctl.cli import other_words
from llmctl.cli.main import COMMANDS, main


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("kill", "llmctl cancel RUN ends a run"),
        ("run", "llmctl submit starts a run"),
        ("man", "llmctl docs lists the pages of the documentation, llmctl docs PAGE shows one"),
        ("LS", "llmctl list lists runs"),
        ("sumbit", "did you mean submit?"),
        ("zzzz", "`llmctl --help` lists the commands"),
    ],
)
@pytest.mark.usefixtures("home")
def test_an_unknown_command_leads_to_the_right_one(word, says, capsys):
    assert main([word, "demo"]) == 2
    assert capsys.readouterr().err == f"llmctl: no command is called {word!r}; {says}\n"


def test_each_answer_names_commands_that_exist():
    for word, answer in other_words.ELSEWHERE.items():
        named = re.findall(r"llmctl (\S+)", answer)
        assert named and all(name in COMMANDS or name == "--version" for name in named), word
        assert word not in COMMANDS


@pytest.mark.usefixtures("home")
def test_help_is_a_word_too(capsys):
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert main(["help"]) == 0
    assert capsys.readouterr().out == page
    assert main(["data", "prepare", "--help"]) == 0
    page = capsys.readouterr().out
    assert main(["help", "data", "prepare"]) == 0
    assert capsys.readouterr().out == page
