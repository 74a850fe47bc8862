"""Flags of sbatch and qsub on ``submit`` and ``interactive``: understood, or answered with our flag."""

import pytest
import yaml

from llmctl.cli.main import main


@pytest.fixture
def site(own_folders):
    """A Slurm cluster with apptainer in the user's folders."""
    clusters = own_folders / "config/llmctl/clusters"
    clusters.mkdir(parents=True)
    profile = {"runs_root": "/runs", "container": {"runtime": "apptainer"}}
    (clusters / "slurm.yaml").write_text(yaml.safe_dump(profile))
    return own_folders


def script_of(capsys, *arguments):
    """The dry run's script without what differs from call to call; the run id is given."""
    words = ["submit", "--cluster", "slurm", "--dry-run", "--show-script", "--run-id", "r", *arguments, "--", "true"]
    assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-N 2 -A g -p part -t 5h -J j", "--nodes 2 --group g --queue part --time 5:00:00 --name j"),
        ("-N2 --account=g --partition=part", "--nodes 2 --group g --queue part"),
        ("-q part -g g --job-name=j --walltime 90m", "--queue part --group g --name j --time 1:30:00"),
        ("-P g --time 1-02:00:00", "--group g --time 1d2h"),
        ("--ntasks-per-node 4", "--gpus-per-node 4"),
        ("--tasks-per-node 4 --gpus-per-node 4", "--gpus-per-node 4"),
        (
            "--container-image docker://i --container-mounts /a:/b,/c:/d --mount /e:/f",
            "--container docker://i --mount /a:/b --mount /c:/d --mount /e:/f",
        ),
    ],
)
def test_words_of_schedulers_make_the_same_job(theirs, ours, capsys):
    assert script_of(capsys, *theirs.split()) == script_of(capsys, *ours.split())


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--gpus 8", "--gpus: give --nodes N, and --gpus-per-node G"),
        ("-n 16", "-n: a node has a rank on each GPU"),
        ("--dependency afterok:1", "--dependency: give --after RUN"),
        ("--ntasks-per-node 1 --gpus-per-node 8", "--ntasks-per-node 1: a node has a rank on each GPU"),
        ("--acount g", "No such option: --acount"),
    ],
)
@pytest.mark.parametrize("command", ["submit", "interactive"])
def test_words_with_another_meaning_are_answered(command, word, says, capsys):
    assert main([command, "--cluster", "slurm", *word.split(), "--", "true"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"llmctl: {says}")
    assert output.out == ""


@pytest.mark.parametrize("command", ["submit", "interactive"])
def test_help_shows_our_words_alone(command, capsys):
    assert main([command, "--help"]) == 0
    page = capsys.readouterr().out
    assert "--queue" in page
    assert not [word for word in ("--partition", "--account", "--container-mounts", "-N ", "tasks-per") if word in page]
