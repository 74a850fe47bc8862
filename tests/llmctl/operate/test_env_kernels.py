"""``llmctl env kernels``: the jobs' Python, code and cache, here and on a login node."""

import json
import os
from pathlib import Path

import pytest

from llmctl.cli.main import main
from tests.llmctl.login_node import started_with, write_cluster

DOCUMENT = '{"a": "document"}'


def test_build_uses_code_cache_and_environment_of_the_jobs(login_node, monkeypatch, capfd):
    for name in ("LLMCTL_CACHE_DIR", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANSWER", DOCUMENT)
    own = login_node / f"runs/.llmctl-{os.geteuid()}"
    assert main(["env", "kernels", "build", "--cluster", "lab"]) == 0
    assert started_with(login_node) == ["trainer", "kernels", "build"]
    _, cache, site = (login_node / "environment").read_text().splitlines()
    code = Path((login_node / "argv").read_text().splitlines()[0]).parent
    assert cache == f"{own}/cache/llmctl"
    assert code.parent == own / "code"
    assert (code / "trainer/ops/build/build.py").is_file()
    assert (code / "csrc/common/dtype.h").is_file() and (code / "csrc/rms_norm/cuda.cu").is_file()
    assert site == "here"
    assert capfd.readouterr().out == f"{DOCUMENT}\n"


def test_kernels_are_built_for_the_gpus_of_the_nodes(login_node):
    nodes = {"h": (8, "H100"), "v": (4, "V100"), "m": (4, "MI300X")}
    kinds = {name: {"gpus": gpus, "gpu": gpu} for name, (gpus, gpu) in nodes.items()}
    write_cluster(login_node, resource_types={**kinds, "c": {}})
    assert main(["env", "kernels", "build", "--cluster", "lab"]) == 0
    assert started_with(login_node) == ["trainer", "kernels", "build", "--architecture", "7.0", "9.0"]


def test_doctor_is_the_default_and_json_is_one_document(login_node, monkeypatch, capfd):
    monkeypatch.setenv("ANSWER", DOCUMENT)
    assert main(["env", "kernels", "--cluster", "lab", "--json"]) == 0
    assert started_with(login_node) == ["trainer", "kernels", "doctor", "--json"]
    assert capfd.readouterr().out == f"{DOCUMENT}\n"


def test_the_exit_code_of_the_command_is_passed_on(login_node, monkeypatch):
    monkeypatch.setenv("STATUS", "3")
    assert main(["env", "kernels", "build", "--cluster", "lab"]) == 3
    assert started_with(login_node)


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
    image = {"kind": "container", "path": "/images/train.sif"}
    write_cluster(login_node, environment=image, container={"runtime": "apptainer"})
    assert main(["env", "kernels", "build", "--cluster", "lab"]) == 3
    message = capsys.readouterr().err
    assert "/images/train.sif" in message
    assert "llmctl interactive --cluster lab -- python3 -m trainer kernels build" in message


def test_the_local_cluster_runs_the_command_here(home, monkeypatch, capfd):
    monkeypatch.setenv("LLMCTL_CACHE_DIR", str(home / "cache"))
    # No node here has kernels or can build them.
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert main(["env", "kernels", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    on_cpu = [row for row in document["operations"] if row["device"] == "cpu"]
    assert on_cpu and "native" not in {row["backend"] for row in on_cpu}
    (library,) = (part for part in document["parts"] if part["name"] == "library")
    assert not library["found"] and library["detail"].startswith("the library is not built")
