"""``llmctl checkpoint``: runs in the place of checkpoints."""

from llmctl.cli.main import main
from llmctl.paths import UserFolders
from llmctl.runs.index import RunIndex
from llmctl.runs.record import RunRecord
from llmctl.transport.local import LocalTransport
from tests.llmctl.login_node import started_with, write_cluster


def add_run(folder, name, config=None):
    """A run of cluster lab, in the index and on the disk; returns its directory."""
    run_dir = folder / "runs" / f"{name}-1"
    run_dir.mkdir(parents=True)
    record = RunRecord(f"{name}-1", name, 1.0, "1", "lab", run_dir, ("llmctl",), {}, config, {}, {})
    environment = {"XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder)}
    record.save(LocalTransport(environment))
    RunIndex(UserFolders.from_environment(environment).state).add(record)
    return run_dir


def test_a_run_is_its_directory_on_its_own_cluster(login_node):
    run_dir = add_run(login_node, "mine", {"checkpoint": {"save": None}})
    for reference in ("mine", "mine-1"):
        assert main(["checkpoint", "export", "--output", reference, reference]) == 0
        expected = ["export", "--output", reference, str(run_dir)]
        assert started_with(login_node) == ["trainer", "checkpoint", *expected]


def test_a_run_that_saves_elsewhere_is_that_folder(login_node):
    add_run(login_node, "mine", {"checkpoint": {"save": "/scratch/mine"}})
    assert main(["checkpoint", "show", "mine"]) == 0
    assert started_with(login_node) == ["trainer", "checkpoint", "show", "/scratch/mine"]


def test_a_folder_here_comes_before_a_run_of_its_name(login_node):
    add_run(login_node, "mine")
    (login_node / "mine").mkdir()
    assert main(["checkpoint", "show", "mine", "--cluster", "lab"]) == 0
    assert started_with(login_node)[-1] == "mine"


def test_neither_path_nor_run_is_an_error(login_node, capsys):
    write_cluster(login_node, "other")
    add_run(login_node, "mine")
    assert main(["checkpoint", "show", "yours", "--cluster", "lab"]) == 5
    assert capsys.readouterr().err.startswith("llmctl: no run is called 'yours'")
    assert main(["checkpoint", "show", "mine", "--cluster", "other"]) == 2
    assert "run mine is on lab" in capsys.readouterr().err
    assert not started_with(login_node)
