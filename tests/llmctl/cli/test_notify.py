"""Notices of real runs on this machine, from flags, config and the user's config file."""

import json

import pytest
import yaml

from llmctl.cli.main import main
from tests.waiting import wait_for


@pytest.fixture
def teller(home):
    """Makes a place by name: a command that notes what it is told in a file of that name."""

    def make(name):
        script = home / f"{name}.sh"
        script.write_text(f'#!/bin/sh\necho "$LLMCTL_EVENT: $LLMCTL_NOTICE" >>{home}/{name}\n')
        script.chmod(0o755)
        return f"command:{script}"

    return make


def test_places_of_config_file_user_and_flags(home, teller, monkeypatch):
    monkeypatch.chdir(home)
    (home / "mine.yaml").write_text(yaml.safe_dump({"job": {"notify": [teller("config")]}}))
    words = [
        "submit",
        "mine.yaml",
        "--notify",
        teller("flag"),
        "--notify",
        teller("config"),
        "--notify-on",
        "fail",
        "--run-id",
        "r",
    ]
    assert main([*words, "--", "sh", "-c", "exit 3"]) == 0
    # A flag that repeats a place of the config does not tell it twice.
    assert json.loads((home / "runs/r/job.json").read_text())["notify"] == [teller("config"), teller("flag")]
    for name in ("config", "flag"):
        wait_for((home / name).exists, f"the notice to {name}")
        assert (home / name).read_text() == "fail: r failed with exit code 3\n"


def test_the_users_own_file_holds_for_all_runs(home, teller, capsys, monkeypatch):
    monkeypatch.chdir(home)
    file = home / "config/llmctl/config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"cluster": "local", "notify": [teller("own")], "notify_on": ["begin", "end"]}))
    assert main(["submit", "--run-id", "r", "--", "true"]) == 0
    wait_for(lambda: (home / "own").exists() and "end: " in (home / "own").read_text(), "the end")
    assert sorted((home / "own").read_text().splitlines())[-1] == "end: r completed"
    capsys.readouterr()
    file.write_text("notify: [me]\n")
    assert main(["submit", "--", "true"]) == 3
    assert capsys.readouterr().err.startswith(f"llmctl: {file}: job.notify: 'me' is not valid: give https://ADDRESS")
    file.write_text("notfy: [me]\n")
    assert main(["submit", "--", "true"]) == 3
    assert "notfy: unknown key; valid keys are cluster, notify, notify_on" in capsys.readouterr().err


@pytest.mark.usefixtures("home")
def test_mail_words_of_schedulers(capsys):
    script = ["submit", "--dry-run", "--json", "--run-id", "r"]
    assert main([*script, "--mail-user", "me@lab.org", "--mail-type=END,FAIL", "--", "true"]) == 0
    theirs = json.loads(capsys.readouterr().out)
    assert main([*script, "--notify", "mailto:me@lab.org", "--notify-on", "end,fail", "--", "true"]) == 0
    assert json.loads(capsys.readouterr().out) == theirs
    for words, says in {
        ("--mail-type", "END,STAGE_OUT"): "--mail-type END,STAGE_OUT: has no counterpart; give --notify-on begin,end",
        ("--mail-type", "END"): "--notify-on: there is no place to tell; give --notify WHERE, or --mail-user ADDRESS",
        ("--notify", "secret:HOOK"): "--notify: secret:HOOK needs the variable; give --secret HOOK too",
        (
            "--notify",
            "https://hooks.slack.com/services/T/B/hidden",
        ): "--notify: the address at hooks.slack.com is a secret",
    }.items():
        assert main(["submit", *words, "--", "true"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"llmctl: {says}") and "hidden" not in said
