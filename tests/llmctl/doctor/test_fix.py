"""``llmctl doctor --fix``: the cures are listed, asked about and run, and the cluster is checked again."""

import json

import pytest

from llmctl.cli.main import main
from tests.llmctl.doctor.test_parsers import FACTS
from tests.llmctl.login_node import write_cluster
from tests.llmctl.operate.environment.made_wheels import without_own_pip_settings

# Reports its packages, and with pip adds those that it is asked for.
PYTHON = """#!/bin/bash
if [[ $1 == -c ]]; then echo "==llmctl-python== $(cat "$NOTES/facts")"; exit; fi
printf '%s\\n' "$*" >>"$NOTES/ran"
[[ $* != *numpy* ]] || cp "$NOTES/facts.cured" "$NOTES/facts"
"""


@pytest.fixture
def lab(own_folders, monkeypatch):
    """Cluster lab on this machine, whose Python lacks numpy and has a torch for other GPUs; its folder."""
    monkeypatch.setenv("NOTES", str(own_folders))
    python = own_folders / "an env's python"
    write_cluster(
        own_folders,
        scheduler="local",
        environment={"python": str(python)},
        resource_types={"h": {"gpus": 8, "gpu": "H100"}},
        defaults={"resource_type": "h"},
    )
    python.write_text(PYTHON)
    python.chmod(0o755)
    facts = {**FACTS, "executable": str(python), "built_for": ["sm_70"]}
    (own_folders / "facts.cured").write_text(json.dumps(facts))
    less = {name: version for name, version in FACTS["packages"].items() if name != "numpy"}
    (own_folders / "facts").write_text(json.dumps({**facts, "packages": less}))
    return own_folders


def test_only_what_adds_something_is_run_and_checked_again(lab, capfd):
    assert main(["doctor", "--cluster", "lab", "--fix", "--yes"]) == 3, "torch for other GPUs is the user's to replace"
    seen = capfd.readouterr()
    assert seen.err.count("-m pip install numpy") == 2 and "--force-reinstall" not in seen.err
    assert (lab / "ran").read_text() == "-m pip install numpy\n"
    first, second = seen.out.split("FAULT    torch build", 1)
    assert "numpy not installed" in first and "numpy not installed" not in second


def test_nothing_runs_unless_somebody_agrees(lab, capfd):
    assert main(["doctor", "--cluster", "lab", "--fix"]) == 2
    told = capfd.readouterr().err
    assert "-m pip install numpy" in told and "--yes runs these commands" in told
    assert not (lab / "ran").exists()


def test_without_a_cure_nothing_runs(lab, capfd):
    (lab / "facts").write_text((lab / "facts.cured").read_text())
    assert main(["doctor", "--cluster", "lab", "--fix", "--yes"]) == 3
    assert "no remedy is a command that llmctl runs by itself" in capfd.readouterr().err
    assert not (lab / "ran").exists()


def test_a_missing_environment_is_built(own_folders, monkeypatch, capfd):
    """The build fails here for want of wheels; the checks go on, and name it again."""
    without_own_pip_settings(monkeypatch)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    place = own_folders / "env"
    write_cluster(own_folders, scheduler="local", environment={"kind": "venv", "path": str(place)})
    assert main(["doctor", "--cluster", "lab", "--fix", "--yes"]) == 3
    seen = capfd.readouterr()
    assert seen.err.count("llmctl env build --cluster lab") == 2 and "step torch failed" in seen.err
    assert (place / "bin/python").exists()
    assert "cannot be activated" in seen.out and seen.out.count("FAULT    environment") == 1
    assert "FAULT    torch" in seen.out


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("words", [["--fix", "--json"], ["--yes"]])
def test_flags_that_do_not_go_together_are_refused(words):
    assert main(["doctor", *words]) == 2
