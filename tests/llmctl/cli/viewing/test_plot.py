"""``llmctl plot``: in a pipe, in a terminal, into files, and what it refuses."""

import pytest

from llmctl.cli.main import main
from llmctl.context import Context
from tests.llmctl.operate.report.made_runs import add, made_run, trained
from tests.llmctl.terminal import on_terminal, without_colours


@pytest.fixture
def run(home):
    """A run that completed, in the index of the user."""
    context = Context.of((), (), {"XDG_STATE_HOME": str(home / "state")}, home)
    return add(context, trained(made_run(home / "runs"))).run_id


def test_a_pipe_gets_plain_text_of_80_columns(run, capsys):
    assert main(["plot", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lm_loss over iteration" and len(lines) == 20 and max(map(len, lines)) <= 80
    assert not any("\x1b" in line for line in lines)
    assert main(["plot", run, "--key", "grad_norm", "--key", "tokens_per_s", "--over", "tokens", "--log"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if " over " in line]
    assert heads == [f"{key} over tokens, logarithmic" for key in ("grad_norm", "tokens_per_s")]


def test_a_terminal_gets_colours_in_its_width(run):
    for width in (60, 120):
        text = on_terminal(["plot", run], width)
        assert "\x1b[36m" in text
        assert width - 12 < max(map(len, without_colours(text).splitlines())) <= width
    assert "\x1b" not in on_terminal(["plot", run], 60, NO_COLOR="1")


def test_a_picture_is_written_and_replaces_only_a_picture(home, run, capsys):
    pytest.importorskip("matplotlib")
    for name in ("x.svg", "x.PNG", "x.pdf"):
        assert main(["plot", run, "--output", name]) == 0
        assert capsys.readouterr().out == f"{name}\n"
        first = (home / name).read_bytes()
        assert main(["plot", run, "--output", name, "--key", "grad_norm"]) == 0
        assert (home / name).read_bytes() != first
        capsys.readouterr()
    (home / "mine.png").write_text("mine")
    assert main(["plot", run, "--output", "mine.png"]) == 2
    assert "mine.png: exists, and is not a picture of llmctl plot; name another file" in capsys.readouterr().err
    assert (home / "mine.png").read_text() == "mine"


def test_wrong_words_are_told_in_one_sentence(home, run, capsys, monkeypatch):
    context = Context.of((), (), {"XDG_STATE_HOME": str(home / "state")}, home)
    add(context, made_run(home / "runs", "empty-261127-120000-abcd", name="empty"))
    capsys.readouterr()
    for words, code, says in [
        ([run, "--key", "los", "--key", "lm_loss"], 2, "--key los: no run has it; there are "),
        (["empty"], 2, "empty: has no metrics: a COMMAND, or a training that has made no step yet"),
        ([run, "--over", "steps"], 2, "--over steps: is none of iteration, tokens, time"),
        ([run, "--output", "x.gif"], 2, "--output x.gif: give a name that ends in .svg, .png, .pdf"),
        (["unknown"], 5, "no run is called 'unknown'"),
    ]:
        assert main(["plot", *words]) == code
        output = capsys.readouterr()
        assert output.err.startswith(f"llmctl: {says}") and output.err.count("\n") == 1 and output.out == ""
    monkeypatch.setattr("llmctl.cli.viewing.plot.find_spec", lambda _: None)
    assert main(["plot", run, "--output", "x.svg"]) == 2
    assert capsys.readouterr().err.startswith("llmctl: --output: needs the package matplotlib; install it: pip install")
    assert not (home / "x.svg").exists()
