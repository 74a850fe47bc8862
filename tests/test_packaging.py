"""The wheel: pure Python, with everything bundled, and a base install with the command line only."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[1]
BUNDLED = ("templates", "clusters", "examples", "csrc", "docs/guide", "docs/reference", "docs/sites")
MAX_PACKAGES = 28
MAX_SITE_PACKAGES_MB = 90


def run(*argv: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout, which it must not find, with a time limit."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | environment
    return subprocess.run(
        argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANG_S, check=False, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, ROOT, cwd=target)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


def test_wheel_is_pure_python_and_complete(wheel: Path) -> None:
    assert wheel.name.startswith("llmctl_pretrain-") and wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "--", "llmctl", "trainer", *BUNDLED], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = {
        path if path.startswith(("llmctl/", "trainer/")) else f"llmctl/_bundled/{path}"
        for path in tracked
        if (ROOT / path).is_file()
    }
    assert expected - names == set()
    assert {name.split("/")[0] for name in names} <= {"llmctl", "trainer"} | {
        f"{wheel.name.split('-py3')[0]}.dist-info"
    }
    assert [name for name in names if name.endswith((".so", ".pyc", ".bin", ".idx"))] == []
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment that holds the wheel's base install and nothing else."""
    place = tmp_path_factory.mktemp("installed")
    # The pip of these tests installs into it: a second pip would take longer to unpack than the packages.
    venv.create(place)
    pip = [sys.executable, "-m", "pip", f"--python={place}/bin/python"]
    pip += ["--disable-pip-version-check", "--no-input", "install", "-q"]
    done = run(*pip, "--constraint", ROOT / "constraints.txt", wheel, cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_base_install_is_small(installed: Path) -> None:
    (site,) = installed.glob("lib/python*/site-packages")
    brought_by_venv = {"pip", "setuptools"}
    packages = {path.name.split("-")[0].lower() for path in site.glob("*.dist-info")} - brought_by_venv
    size_mb = sum(path.lstat().st_size for path in site.rglob("*") if path.is_file()) / 1e6
    assert "torch" not in packages and "numpy" not in packages
    assert len(packages) <= MAX_PACKAGES, sorted(packages)
    assert size_mb <= MAX_SITE_PACKAGES_MB


def test_installed_commands_work_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    llmctl = installed / "bin/llmctl"
    where = run(installed / "bin/python", "-c", "import llmctl, trainer; print(trainer.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(installed)), where.stdout + where.stderr
    shown = run(llmctl, "--help", cwd=tmp_path)
    assert shown.returncode == 0 and "submit" in shown.stdout, shown.stdout + shown.stderr
    listed = run(llmctl, "clusters", "list", cwd=tmp_path)
    assert listed.returncode == 0 and "local" in listed.stdout, listed.stdout + listed.stderr


def test_installed_submit_without_torch(wheel: Path, installed: Path, tmp_path: Path) -> None:
    """A dry run and a COMMAND need no torch; training is refused with the package to install."""
    argv = (installed / "bin/llmctl", "submit", "--cluster", "local", "--run-id", "wheel-test")
    for more in ((), ("--", "echo", "hello")):
        shown = run(*argv, "--show-script", *more, cwd=tmp_path, HOME=str(tmp_path))
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert shown.stdout.startswith("#!") and ("echo" if more else "pretrain") in shown.stdout
    training = run(*argv, cwd=tmp_path, HOME=str(tmp_path))
    assert training.returncode == 3, training.stdout + training.stderr
    assert "has no torch" in training.stderr and f"pip install '{wheel}[train]'" in training.stderr
    assert "Traceback" not in training.stderr
    assert list(tmp_path.iterdir()) == []
