"""``llmctl checkpoint`` and ``llmctl data``: the trainer's commands in the jobs' environment."""

import pytest

from llmctl.cli.main import main
from tests.llmctl.login_node import started_with

ACCEPTED = [
    ["checkpoint", "import", "a b", "--output", "c"],
    ["checkpoint", "export", "./a", "--output", "c", "--max-shard-bytes", "5", "--no-verify"],
    ["checkpoint", "export", "--output=c", "./a"],
    ["checkpoint", "show", "a/iter_0000005"],
    ["checkpoint", "verify", "./a", "--against", "b"],
    ["data", "inspect", "a b", "c"],
    ["data", "inspect", "a", "--verify", "--json", "--samples", "0", "--tokenizer-model", "t", "--vocab-file", "v"],
    ["data", "inspect", "--tokenizer", "t", "--special-tokens", "<E>", "--special-tokens", "<F>", "a"],
    ["data", "merge", "a", "b", "--output", "c"],
    ["data", "merge", "--input", "a", "b", "--output-prefix", "c"],
]


def test_flags_reach_the_trainer(login_node, monkeypatch):
    monkeypatch.setenv("STATUS", "3")
    for words in ACCEPTED:
        assert main([*words, "--cluster", "lab"]) == 3
        assert started_with(login_node) == ["trainer", *words]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("checkpoint import a", "the following arguments are required: --output"),
        ("checkpoint export a --output b --shard 5", "unrecognized arguments: --shard"),
        ("checkpoint export a --output b --max-shard-bytes 5G", "argument --max-shard-"),
        ("checkpoint show", "the following arguments are required: CKPT|HF_DIR"),
        ("data inspect a --samples -1", "argument --samples: '-1' is not a number"),
        ("data inspect", "no input was given; name files or folders"),
        ("data merge a", "the following arguments are required: --output"),
        ("data merge a --output b --tok t", "unrecognized arguments: --tok"),
        ("data prepare a --output b --max-documents 5", "--max-documents: all documents"),
    ],
)
def test_wrong_flags_are_an_error_and_start_nothing(login_node, capsys, words, says):
    room, command, *rest = words.split()
    assert main([room, command, *rest, "--cluster", "lab"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"llmctl {room} {command}: {says}")
    assert message.splitlines()[1:] in ([], [f"see llmctl {room} {command} --help"])
    assert not started_with(login_node)


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        *((f"checkpoint {name}", "--cluster NAME") for name in ("import", "export", "show", "verify")),
        *((f"data {name}", "--input") for name in ("prepare", "inspect", "merge")),
        ("generate", "--top-p P"),
    ],
)
def test_help_shows_the_flags_of_the_trainer_and_of_llmctl(capsys, command, flag):
    assert main([*command.split(), "--help"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"Usage: llmctl {command} ")
    assert flag in output and "--cluster NAME" in output


@pytest.mark.usefixtures("home")
def test_the_local_cluster_runs_the_command_here(capfd):
    assert main(["checkpoint", "import", "nothing", "--output", "made"]) == 3
    assert capfd.readouterr().err.startswith("llmctl checkpoint import: nothing: is not a folder")
