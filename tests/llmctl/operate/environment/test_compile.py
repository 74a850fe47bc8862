"""``llmctl env build --with``: a C extension is compiled once, and its wheel taken again. No network."""

import json
import shlex
import subprocess
import sys

import pytest

from llmctl.cli.main import main
from llmctl.errors import UsageError
from llmctl.operate.environment.compile_steps import PROGRAM, compile_steps
from llmctl.operate.environment.packages import parse_package
from llmctl.operate.environment.steps import Wanted
from tests.llmctl.operate.environment.made_wheels import (
    without_own_pip_settings,
    write_llmctl,
    write_sdist,
    write_setuptools,
    write_torch,
)

WANTED = Wanted("/e", "python3", (), "torch>=2.10", None, None, ["numpy"], "/runs/.llmctl-7", ["8.0", "8.6", "9.0"])


@pytest.fixture
def links(home, monkeypatch):
    """Folder of all wheels that an environment needs."""
    without_own_pip_settings(monkeypatch)
    folder = home / "wheels"
    write_torch(folder, "2.11.0")
    write_llmctl(folder)
    write_setuptools(folder)
    return folder


def build(path, links, sdist):
    return main(["env", "build", "--path", str(path), "--find-links", str(links), "--with", str(sdist)])


def answer_of(path):
    return int(subprocess.check_output([path / "bin/python", "-c", "import tiny_ext; print(tiny_ext.answer())"]))


def test_an_extension_is_compiled_once_for_two_environments(home, links, capfd, monkeypatch):
    sdist = write_sdist(home / "its source", 41)
    first, second = home / "one", home / "two"
    assert build(first, links, sdist) == 3
    told = capfd.readouterr().err
    assert "step compile tiny_ext failed" in told and "no CUDA compiler: add a module that has nvcc" in told

    monkeypatch.setenv("CC_MODULE", "gcc")
    assert build(first, links, sdist) == 0
    told = capfd.readouterr().err
    assert "[4/6] build tools: done before\n[5/6] compile tiny_ext: begins" in told and "compilers" in told
    assert answer_of(first) == 41

    assert build(second, links, sdist) == 0
    told = capfd.readouterr().err
    assert "[5/6] compile tiny_ext: the wheel was compiled before" in told and "compilers" not in told
    assert answer_of(second) == 41

    # Another file of the same name and version is another source.
    assert build(first, links, write_sdist(home / "its source", 42)) == 0
    told = capfd.readouterr().err
    assert "[4/6] build tools: done before\n[5/6] compile tiny_ext: again" in told
    assert answer_of(first) == 42
    (wheels,) = (home / "runs").glob(".llmctl-*/wheels/tiny_ext")
    assert len(list(wheels.glob("*/sm-any-cpython-*-2.11.0-12.8/tiny_ext-1.0-*.whl"))) == 2
    assert list(json.loads((first / "llmctl-env.json").read_text())["steps"])[-1] == "install tiny_ext"


def test_repositories_are_fetched_before_the_job_and_compiled_for_the_nodes():
    packages = [parse_package(word) for word in ("apex@25.09", "flash-attn", "transformer-engine")]
    steps = {step.name: step for step in compile_steps(WANTED, packages)}
    assert [name for name, step in steps.items() if step.in_job] == [
        "compile apex", "compile flash-attn", "compile transformer-engine",
    ]  # fmt: skip
    assert "https://github.com/NVIDIA/apex" in " ".join(steps["fetch apex"].lines)
    assert 'git -C "$part" checkout --quiet 25.09' in steps["fetch apex"].lines
    exports = {name: shlex.split(step.lines[1]) for name, step in steps.items() if step.in_job}
    assert {"APEX_CUDA_EXT=1", "TORCH_CUDA_ARCH_LIST=8.0;8.6;9.0"} < set(exports["compile apex"])
    assert "FLASH_ATTN_CUDA_ARCHS=80;90" in exports["compile flash-attn"]
    assert "NVTE_CUDA_ARCHS=80;86;90" in exports["compile transformer-engine"]
    assert all("--no-build-isolation" in " ".join(step.lines) for step in steps.values() if step.in_job)


def test_a_wheel_is_only_installed():
    assert [step.name for step in compile_steps(WANTED, [parse_package("/w/apex-0.1-py3-none-any.whl")])] == [
        "install apex"
    ]


@pytest.mark.parametrize("word", ["numpy", "/tmp/notes.txt", "apex@$(x)", "apex@-x"])
def test_other_words_are_refused(word):
    with pytest.raises(UsageError, match="--with"):
        parse_package(word)


def test_a_missing_file_is_refused(home, links, capsys):
    assert build(home / "e", links, home / "none-1.tar.gz") == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cores", "gib", "each", "most"), [("1", "0", "1", 1), ("0", "4", "4", 1), ("0", "0", "9999999", 1)]
)
def test_compilers_fit_cores_and_memory(cores, gib, each, most):
    assert int(subprocess.check_output([sys.executable, PROGRAM, cores, gib, each])) == most
