"""``llmctl doctor`` on this machine, and on a login node with stand-in commands."""

import json
import os
import pwd
import sys
from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.doctor.cluster import judge_places, judge_scheduler
from llmctl.doctor.probes import Section
from llmctl.site.profile import ClusterProfile
from llmctl.transport.file_writes import PathFacts
from tests.llmctl.doctor.test_parsers import FACTS

STANDINS = Path(__file__).parents[2] / "standins/login_node"


@pytest.fixture
def login_node(own_folders, monkeypatch):
    """This machine as a login node of Slurm; returns a function that writes the overlay."""
    monkeypatch.setenv("PATH", f"{STANDINS}:{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN_PYTHON", json.dumps(FACTS))
    folder = own_folders / "config/llmctl/clusters"
    folder.mkdir(parents=True)

    def write(**more):
        values = {
            "scheduler": "slurm",
            "group": "physics",
            "group_required": True,
            "runs_root": str(own_folders / "runs"),
            "resource_types": {"h100": {"gpus": 8, "gpu": "H100", "queue": "main"}},
            "defaults": {"resource_type": "h100"},
            "environment": {"python": str(STANDINS / "python-of-job")},
            "rendezvous": {"interface": "ib0"},
            "container": {"runtime": "pyxis"},
            **more,
        }
        (folder / "lab.yaml").write_text(json.dumps(values))

    write()
    return write


def examined(capsys, cluster="lab"):
    """Exit code, and check -> (state, detail, remedy)."""
    code = main(["doctor", "--cluster", cluster, "--json"])
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["cluster"] == cluster
    checks = document["checks"]
    assert all(check["remedy"] for check in checks if check["state"] == "FAULT")
    assert document["faults"] == sum(check["state"] == "FAULT" for check in checks)
    return code, {check["name"]: (check["state"], check["detail"], check["remedy"]) for check in checks}


def test_this_machine_has_no_problem(capsys, home):
    code, checks = examined(capsys, "local")
    assert code == 0
    assert checks["python"][1].endswith(f" at {sys.executable}")
    assert checks["torch"][0] == checks["connection"][0] == checks["runs_root"][0] == "ok"
    assert "scheduler" not in checks and "group" not in checks and "shared" not in checks
    assert not (home / "runs").exists()


@pytest.mark.usefixtures("login_node")
def test_a_login_node_without_problems(capsys):
    code, checks = examined(capsys)
    assert code == 0
    assert {name for name, (state, _, _) in checks.items() if state == "ok"} >= {
        *("connection", "scheduler", "group", "runs_root", "quota", "python", "packages", "torch", "torch build"),
        *("driver", "container", "interface", "clock", "locale", "supervisor"),
    }
    assert checks["scheduler"][1] == "slurm-wlm 24.05.4"
    assert checks["interface"][1] == "ib0 is 10.11.12.13 here"
    assert "550.54.15, 2 x NVIDIA H100" in checks["driver"][1]


# A problem (variables of the stand-ins, changes of the profile), then check, state, exit code, words of the remedy.
TROUBLES = [
    ({"STANDIN_SLURM_DOWN": "1"}, {}, "scheduler", "FAULT", 4, "sinfo -h -o %R"),
    ({"STANDIN_SLURM_VERSION": "20.11.9"}, {}, "scheduler version", "warning", 0, ""),
    ({}, {"group": None}, "group", "FAULT", 3, "clusters setup lab --group G (yours: llm-group, physics)"),
    ({}, {"group": "chemistry"}, "group", "FAULT", 3, "llm-group, physics"),
    ({"LLMCTL_GROUP": "llm-group"}, {"group": None}, "group", "ok", 0, ""),
    ({"STANDIN_HOME_KIB": "20971521*"}, {}, "quota", "FAULT", 3, "remove old runs"),
    ({"STANDIN_HOME_KIB": "20000000"}, {}, "quota", "warning", 0, "remove old runs"),
    ({}, {"runs_root": "/proc/version/runs"}, "runs_root", "FAULT", 3, "clusters setup lab --runs-root DIR"),
    ({"STANDIN_PYTHON_FAILS": "1"}, {}, "environment", "FAULT", 3, "clusters setup lab --venv DIR"),
    (
        {},
        {"environment": {"kind": "venv", "path": "/no/venv"}},
        "environment",
        "FAULT",
        3,
        "llmctl env build --cluster lab",
    ),
    ({"STANDIN_PYTHON": json.dumps({**FACTS, "built_for": ["sm_70"]})}, {}, "torch build", "FAULT", 3, "pip install"),
    ({"STANDIN_DRIVER": "470.57.02"}, {}, "driver", "FAULT", 3, "525.60.13"),
    ({"STANDIN_NO_PYXIS": "1"}, {}, "container", "warning", 0, "apptainer or enroot"),
    (
        {"STANDIN_NO_PYXIS": "1"},
        {"environment": {"kind": "container", "path": "/images/a.sqsh"}},
        "container",
        "FAULT",
        3,
        "ask the site for pyxis",
    ),
    ({}, {"container": {}, "environment": {"kind": "container", "path": "/a"}}, "container", "FAULT", 3, "runtime"),
    ({}, {"rendezvous": {"interface": "ib7"}}, "interface", "note", 0, ""),
    ({}, {"defaults": {"resource_type": "h100", "queue": "gone"}}, "queues", "warning", 0, "valid are debug, main"),
    ({"STANDIN_CHARMAP": "ANSI_X3.4-1968"}, {}, "locale", "warning", 0, "export LC_ALL=C.UTF-8"),
]


@pytest.mark.parametrize(("variables", "change", "name", "state", "code", "remedy"), TROUBLES)
def test_a_problem_is_reported_with_its_remedy(
    login_node, capsys, monkeypatch, variables, change, name, state, code, remedy
):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    login_node(**change)
    found_code, checks = examined(capsys)
    assert checks[name][0] == state
    assert remedy in checks[name][2]
    assert found_code == code


@pytest.mark.parametrize(("mode", "is_open"), [(0o777, True), (0o775, True), (0o1777, False), (0o755, False)])
@pytest.mark.parametrize("way", ["runs", "link/of mine/runs"])
def test_a_folder_above_the_runs_in_which_others_can_rename_is_named(login_node, capsys, tmp_path, mode, is_open, way):
    above = tmp_path / "shared $(by all)"
    (above / "of mine").mkdir(parents=True)
    above.chmod(mode)
    (tmp_path / "link").symlink_to(above)
    login_node(runs_root=str((above if way == "runs" else tmp_path) / way))
    assert main(["doctor", "--cluster", "lab"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [number for number, line in enumerate(lines) if "above runs_root" in line and str(tmp_path) in line]
    assert len(found) == is_open
    for number in found:
        owner = pwd.getpwuid(os.geteuid()).pw_name
        assert f"others may write to {above} (owner {owner}, mode {mode:04o}), which has no sticky" in lines[number]
        assert lines[number].startswith("warning") and f"chmod go-w '{above}'" in lines[number + 1]


def test_modules_that_cannot_be_loaded_are_named(login_node, capsys, tmp_path):
    init = tmp_path / "init.sh"
    init.write_text('module() { [ "$2" = gcc ] || { echo "ModuleCmd_Load.c: cannot load $2" >&2; return 1; }; }\n')
    python = str(STANDINS / "python-of-job")
    login_node(environment={"module_init": str(init), "modules": ["gcc"], "python": python})
    assert examined(capsys)[1]["modules"] == ("ok", "gcc", "")
    login_node(environment={"module_init": str(init), "modules": ["gcc", "cuda/99"], "python": python})
    code, checks = examined(capsys)
    assert code == 3
    assert "cannot load cuda/99" in checks["environment"][1]
    assert "module avail" in checks["environment"][2]


def test_a_python_for_another_architecture_is_not_checked(login_node, capsys, tmp_path):
    python = tmp_path / "python"
    python.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00" + bytes(44))  # of an aarch64 machine
    python.chmod(0o755)
    login_node(environment={"python": str(python)})
    code, checks = examined(capsys)
    assert code == 0
    assert checks["python"][0] == "note" and "another processor architecture" in checks["python"][1]


def test_missing_commands_are_reported_with_how_to_set_the_login_node(login_node, capsys, monkeypatch):
    login_node(scheduler="pbs", container={})
    monkeypatch.setenv("PATH", f"{STANDINS}:/usr/bin:/bin")
    code, checks = examined(capsys)
    assert code == 4
    assert checks["scheduler"][0] == "FAULT" and "pbsnodes" in checks["scheduler"][1]


def test_missing_or_unreachable_machines(login_node, capsys):
    login_node(scheduler="ssh", hosts=[], container={})
    code, checks = examined(capsys)
    assert (code, list(checks)) == (3, ["connection"])
    assert "--host A" in checks["connection"][2]


def test_an_unreachable_login_node_ends_doctor_with_4(login_node, capsys):
    login_node(login={"host": "nowhere.invalid"})
    code, checks = examined(capsys)
    assert (code, list(checks)) == (4, ["connection"])
    assert checks["connection"][2].startswith("ssh nowhere.invalid")


def test_plain_lines_in_a_pipe(login_node, capsys):
    login_node(group=None)
    assert main(["doctor", "--cluster", "lab"]) == 3
    lines = capsys.readouterr().out.splitlines()
    fault = next(number for number, line in enumerate(lines) if line.startswith("FAULT    group"))
    assert lines[fault + 1].strip().startswith("fix: llmctl clusters setup lab --group G")


def test_a_missing_answer_causes_no_crash():
    profile = ClusterProfile(name="a", scheduler="slurm")
    sections = {"commands": Section(0, ""), "version": Section(127, ""), "queues": Section(124, "")}
    assert judge_scheduler(profile, sections)[0].state == "FAULT"


def test_a_network_file_system_is_probably_shared():
    profile = ClusterProfile(name="a", scheduler="slurm")
    facts = PathFacts("folder", "/work", "folder", True, False, 1 << 42)
    table = (
        "Filesystem     Type   1024-blocks      Used  Available Capacity Mounted on\n{} 1000000000 1 999999999 1% /work"
    )
    for kind, state in (("10.0.0.1@o2ib:/work lustre", "ok"), ("/dev/sda1 xfs", "warning"), ("a b:/x nfs4", "ok")):
        checks = judge_places(profile, "/work/runs", facts, {"place": Section(0, table.format(kind))})
        assert [check.state for check in checks if check.name == "shared"] == [state]
    little = PathFacts("folder", "/work", "folder", True, False, 1 << 30)
    assert judge_places(profile, "/work/runs", little, {})[0].state == "warning"
