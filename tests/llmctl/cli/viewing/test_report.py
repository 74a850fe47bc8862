"""``llmctl report``: its file, and what it refuses."""

from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.context import Context
from tests.llmctl.operate.report.made_runs import add, made_run, trained


@pytest.fixture
def run(home: Path) -> str:
    """A run that completed, in the index of the user."""
    context = Context.of((), (), {"XDG_STATE_HOME": str(home / "state")}, home)
    return add(context, trained(made_run(home / "runs"))).run_id


def test_a_page_is_written_here_and_replaces_only_a_page(home, run, capsys):
    assert main(["report", run]) == 0
    target = home / f"report-{run}.html"
    assert capsys.readouterr().out == f"{target.name}\n"
    first = target.read_text()
    assert first.startswith("<!doctype html>") and run in first
    assert target.stat().st_mode & 0o777 == 0o644
    target.write_text(first.replace("</html>", "</html><!-- older -->"))
    assert main(["report", run]) == 0
    assert "<!-- older -->" not in target.read_text()
    capsys.readouterr()
    target.write_text("<html>mine</html>")
    assert main(["report", run]) == 2
    assert capsys.readouterr().err == (
        f"llmctl: --output {target}: exists, and is not a page of llmctl report; name another file\n"
    )
    assert target.read_text() == "<html>mine</html>"
    assert [path.name for path in home.iterdir() if path.name.startswith(".report-")] == []


def test_several_runs_make_one_page_with_one_name(home, run, capsys):
    context = Context.of((), (), {"XDG_STATE_HOME": str(home / "state")}, home)
    add(context, trained(made_run(home / "runs", "other-261127-120000-abcd", name="other")))
    assert main(["report", run, "other", run]) == 0
    assert capsys.readouterr().out == f"report-{run}-and-1-more.html\n"
    (home / "sub").mkdir()
    assert main(["report", "other", "--output", "sub/x.html"]) == 0
    assert capsys.readouterr().out == "sub/x.html\n" and (home / "sub/x.html").is_file()


def test_wrong_words_are_told_in_one_sentence(home, run, capsys):
    assert main(["report", "unknown"]) == 5
    assert capsys.readouterr().err.startswith("llmctl: no run is called 'unknown'; the newest are ")
    assert main(["report", run, "--output", "absent/x.html"]) == 3
    assert capsys.readouterr().err == (
        f"llmctl: --output {home}/absent/x.html: cannot be written: No such file or directory\n"
    )
    assert main(["report", run, "--output", "runs"]) == 2
    assert capsys.readouterr().err == f"llmctl: --output {home}/runs: cannot be written: Is a directory\n"
    (home / f"runs/{run}/run.json").unlink()
    assert main(["report", run]) == 5
    assert capsys.readouterr().err == f"llmctl: {home}/runs/{run}/run.json: is not there\n"
