"""Templates of job.sh that a site or a user has changed."""

import json

import pytest

from llmctl.cli.main import main
from tests.waiting import wait_for

TEMPLATE = """#!/bin/bash
# edited by the site
{% set job_id, supervisor = '"$$"', "" %}
{% include "_supervisor.sh.j2" %}
load_environment() { :; }
if [[ $part == launch ]]; then
    for ((node = 0; node < {{ nodes }}; node++)); do echo "127.0.0.1 slots=1"; done >"$LLMCTL_HOSTFILE"
    bash "$LLMCTL_ATTEMPT_DIR/job.sh" node "$LLMCTL_ATTEMPT" 127.0.0.1 "$LLMCTL_MASTER_PORT" 0
    exit
fi
export SITE=ours
{% include "_ranks.sh.j2" %}
"""


@pytest.fixture
def place(home):
    (home / "mine.sh.j2").write_text(TEMPLATE)
    return home


def ended(place, attempt):
    path = place / f"runs/r/attempts/{attempt}/exit.json"
    wait_for(path.exists, str(path))
    return json.loads(path.read_text())


def test_a_run_keeps_its_template(place, capsys):
    """Even if the file was removed, and if the launch line does not use exec."""
    words = ["submit", "--run-id", "r", "--template", "mine.sh.j2", "--", "bash", "-c", "echo $SITE $LLMCTL_ATTEMPT"]
    assert main([*words[:1], "--show-script", *words[1:]]) == 0
    printed = capsys.readouterr().out
    assert main(words) == 0
    assert ended(place, 1)["reason"] == "completed"
    assert printed.startswith((place / "runs/r/job.sh").read_text())
    (place / "mine.sh.j2").unlink()
    assert main(["resume", "r"]) == 0
    assert ended(place, 2)["reason"] == "completed"
    logs = [(place / f"runs/r/attempts/{attempt}/node-00000.log").read_text() for attempt in (1, 2)]
    assert logs == ["ours 1\n", "ours 2\n"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/bash\nrun {{ run_idd }}\n", "mine.sh.j2:2: 'run_idd' is undefined; valid names: "),
        ("#!/bin/bash\n\n{% if %}\n", "mine.sh.j2:3: "),
        ('{% include "_ranks.sh" %}', "mine.sh.j2:1: "),
    ],
)
def test_an_error_in_a_template_names_file_and_line(place, capsys, text, message):
    (place / "mine.sh.j2").write_text(text)
    assert main(["submit", "--template", "mine.sh.j2", "--show-script", "--", "true"]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_a_template_that_cannot_be_read_is_refused(capsys):
    assert main(["submit", "--template", "none.j2", "--", "true"]) == 2
    assert "--template none.j2: cannot be read: No such file" in capsys.readouterr().err


def test_a_partial_template_of_the_user_takes_precedence(place, capsys):
    (place / "config/llmctl/templates").mkdir(parents=True)
    (place / "config/llmctl/templates/_environment.sh.j2").write_text("load_environment() { echo ours; }\n")
    assert main(["submit", "--show-script", "--", "true"]) == 0
    assert "load_environment() { echo ours; }\n" in capsys.readouterr().out
