"""``llmctl env kernels``: the jobs' Python, code and cache, here and on a login node."""

import json
import os
from pathlib import Path

import pytest

from llmctl.cli.main import main

PYTHON = """#!/bin/bash
# Stand-in for a job's Python: answers the probe, and records the command that it gets and its environment.
if [[ $1 == -c ]]; then echo "3.12.1 2.11.0 ${PROBED_CUDA--} 0"; exit; fi
printf '%s\\n' "$@" >"$NOTES/argv"
printf '%s\\n' "$PYTHONPATH" "$LLMCTL_CACHE_DIR" "$SITE" >"$NOTES/environment"
echo '{"a": "document"}'
exit "${STATUS-0}"
"""


@pytest.fixture
def login_node(tmp_path, monkeypatch):
    """This machine as the login node of cluster lab; returns the folder of its notes."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("NOTES", str(tmp_path))
    for name in ("LLMCTL_RUNS_ROOT", "LLMCTL_CACHE_DIR", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    python = tmp_path / "python of jobs"
    python.write_text(PYTHON)
    python.chmod(0o755)
    profile = {
        "scheduler": "slurm",
        "runs_root": str(tmp_path / "work/runs"),
        "environment": {"python": str(python), "setup": ["export SITE=here"]},
        "rendezvous": {"interface": "ib0"},
    }
    (tmp_path / "config/llmctl/clusters").mkdir(parents=True)
    (tmp_path / "config/llmctl/clusters/lab.yaml").write_text(json.dumps(profile))
    return tmp_path


def test_build_uses_code_cache_and_environment_of_the_jobs(login_node, capfd):
    own = login_node / f"work/runs/.llmctl-{os.geteuid()}"
    assert main(["env", "kernels", "build", "--cluster", "lab"]) == 0
    assert (login_node / "argv").read_text().split() == ["-m", "trainer", "kernels", "build"]
    code, cache, site = (login_node / "environment").read_text().splitlines()
    assert cache == f"{own}/cache/llmctl"
    assert Path(code).parent == own / "code"
    assert (Path(code) / "trainer/ops/build/build.py").is_file()
    assert (Path(code) / "csrc/common/dtype.h").is_file() and (Path(code) / "csrc/rms_norm/cuda.cu").is_file()
    assert site == "here"
    assert capfd.readouterr().out == '{"a": "document"}\n'


def test_kernels_are_built_for_the_gpus_of_the_nodes(login_node):
    path = login_node / "config/llmctl/clusters/lab.yaml"
    kinds = {
        "h": {"gpus": 8, "gpu": "H100"},
        "v": {"gpus": 4, "gpu": "V100"},
        "m": {"gpus": 4, "gpu": "MI300X"},
        "c": {},
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), "resource_types": kinds}))
    assert main(["env", "kernels", "build", "--cluster", "lab"]) == 0
    words = (login_node / "argv").read_text().split()
    assert words == ["-m", "trainer", "kernels", "build", "--architecture", "7.0", "9.0"]


def test_doctor_is_the_default_and_json_is_one_document(login_node, capfd):
    assert main(["env", "kernels", "--cluster", "lab", "--json"]) == 0
    assert (login_node / "argv").read_text().split() == ["-m", "trainer", "kernels", "doctor", "--json"]
    assert json.loads(capfd.readouterr().out) == {"a": "document"}


def test_the_exit_code_of_the_command_is_passed_on(login_node, monkeypatch):
    monkeypatch.setenv("STATUS", "3")
    assert main(["env", "kernels", "build", "--cluster", "lab"]) == 3
    assert (login_node / "argv").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["bench"], 2, "'bench': llmctl env kernels takes doctor or build"),
        (["build", "--json"], 2, "--json: build prints no document; leave --json out"),
        (["--cluster", "nowhere"], 2, "nowhere"),
    ],
)
def test_invalid_requests_are_refused(words, code, message, capsys):
    assert main(["env", "kernels", *words]) == code
    assert message in capsys.readouterr().err


def test_an_image_is_not_started_here(login_node, capsys):
    path = login_node / "config/llmctl/clusters/lab.yaml"
    profile = json.loads(path.read_text())
    profile["environment"] = {"kind": "container", "path": "/images/train.sif"}
    path.write_text(json.dumps({**profile, "container": {"runtime": "apptainer"}}))
    assert main(["env", "kernels", "build", "--cluster", "lab"]) == 3
    message = capsys.readouterr().err
    assert "/images/train.sif" in message
    assert "llmctl interactive --cluster lab -- python3 -m trainer kernels build" in message


def test_the_local_cluster_runs_the_command_here(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("LLMCTL_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("LLMCTL_CACHE_DIR", str(tmp_path / "cache"))
    # No node here has kernels or can build them.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert main(["env", "kernels", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    on_cpu = [row for row in document["operations"] if row["device"] == "cpu"]
    assert on_cpu and "native" not in {row["backend"] for row in on_cpu}
    (library,) = (part for part in document["parts"] if part["name"] == "library")
    assert not library["found"] and library["detail"].startswith("the library is not built")
