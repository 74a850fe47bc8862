"""The first command on an empty home: a dry run on every bundled cluster, and runs without a runs_root."""

from pathlib import Path

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.paths import BUNDLED

CLUSTERS = sorted(path.stem for path in (BUNDLED / "clusters").glob("*.yaml"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Environment of a user without files, whose PATH has no scheduler, and whose ssh reaches no machine."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin/ssh"
    ssh.write_text(f'#!/bin/sh\ncase "$1" in -G) echo "user ada";; *) echo "$@" >> {tmp_path}/asked; exit 255;; esac\n')
    ssh.chmod(0o755)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return {"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "LOGNAME": "ada"}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_dry_run_needs_no_set_up_host_or_network(cluster, home, capsys, tmp_path):
    assert main(["submit", "--cluster", cluster, "--show-script"], home) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!")
    assert ("YOUR-" in shown.out) == ("placeholders for values that are not set: YOUR-" in shown.err)
    assert not (tmp_path / "asked").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "work"]


def test_the_command_that_this_project_exists_for(home, capsys):
    assert main(["submit", "--cluster", "abci", "--nodes", "8", "--group", "gaa50001", "--show-script"], home) == 0
    shown = capsys.readouterr()
    assert "/groups/gaa50001/ada/llmctl-runs/" in shown.out and "qsub -g gaa50001" in shown.out
    assert "runs_root is unset: the run goes to /groups/gaa50001/ada/llmctl-runs, the work area of abci;" in shown.err
    assert "placeholders" not in shown.err


def test_a_dry_run_shows_a_plan_of_at_most_fifteen_lines(home, capsys):
    assert main(["submit", "--cluster", "abci", "--nodes", "8", "--dry-run"], home) == 0
    shown = capsys.readouterr()
    labels = [line.split()[0] for line in shown.out.splitlines()[1:]]
    assert labels == [
        *("model", "layout", "batch", "length", "data", "start", "estimate", "job", "folder", "defaults"),
    ]
    assert len(shown.out.splitlines()) <= 15
    assert "6.16 M parameters: 8 layers of 256, 8 heads, vocabulary 256" in shown.out
    assert "32 ranks: dp 32, fp32" in shown.out and "V100-16GB" in shown.out
    assert "8 nodes of rt_F x 4 GPUs x 1 h = 8 node-hours, at most 9.6 ABCI points" in shown.out
    assert "nothing was submitted; --show-script prints the job script" in shown.err


def test_hosts_that_nobody_has_named_are_placeholders(home, capsys, tmp_path):
    assert main(["clusters", "new", "lab", "--scheduler", "ssh", "--host", "m1", "--host", "m2"], home) == 0
    capsys.readouterr()
    assert main(["submit", "--cluster", "lab", "--nodes", "2", "--show-script"], home) == 0
    shown = capsys.readouterr()
    assert (
        "# submitted on m2: bash /YOUR-HOME/llmctl-runs/" in shown.out and "/YOUR-ENVIRONMENT/bin/python" in shown.out
    )
    assert "YOUR-HOME (your home directory there, which a dry run does not ask for)" in shown.err
    assert not (tmp_path / "asked").exists()


def test_submit_still_refuses_what_the_site_needs(home, capsys):
    assert main(["submit", "--cluster", "abci3", "--", "true"], home) == 3
    assert "abci3 needs a group, project or account to bill" in capsys.readouterr().err


def test_without_a_runs_root_the_run_goes_to_the_work_area_or_home_and_submit_says_so(home, capsys, tmp_path):
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text("#!/bin/sh\necho 4242\n")
    sbatch.chmod(0o755)
    file = tmp_path / ".config/llmctl/clusters/bed.yaml"
    file.parent.mkdir(parents=True)
    command = ["submit", "--cluster", "bed", "--run-id", "r", "--group", "g1", "--", "true"]
    for profile, folder, place in (
        ({}, f"{tmp_path}/llmctl-runs", "in your home directory, which may have a small quota"),
        ({"work_area": f"{tmp_path}/area/{{group}}/{{user}}"}, f"{tmp_path}/area/g1/ada", "the work area of bed"),
    ):
        file.write_text(yaml.safe_dump({"scheduler": "slurm", **profile}))
        assert main(command, home) == 0
        assert f"runs_root is unset: the run goes to {folder}, {place}; `llmctl cl" in capsys.readouterr().err
        assert Path(folder, "r/run.json").is_file()
