"""``llmctl env build`` on a real Slurm: modules, a C extension that a job compiles, and its wheel."""

import json
import signal
import sys
from pathlib import Path

import pytest
import yaml

from tests.llmctl.operate.environment.made_wheels import write_sdist
from tests.schedulers.environments.module_system import write_modules, write_wheels
from tests.schedulers.slurm_site import Site, site
from tests.testbeds.slurm_cluster import slurm_cluster
from tests.waiting import HANG_S, wait_for

__all__ = ["site", "slurm_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def links(site: Site) -> Path:
    """Wheels for environments; writes the profiles bed-env, bed-env-held and bed-env-wrong, which use modules."""
    init = write_modules(site.home)
    place = site.home / ".config/llmctl/clusters"
    profile = yaml.safe_load((place / "bed.yaml").read_text())
    software = {"modules": ["gcc/12"], "module_init": str(init), "kind": "venv", "path": str(site.home / "an env")}
    kinds = {"cpu": {"gpus": 0, "cores": 2, "memory_gib": 4}}
    profile |= {"environment": software, "resource_types": kinds}
    (place / "bed-env.yaml").write_text(yaml.safe_dump(profile))
    (place / "bed-env-held.yaml").write_text(yaml.safe_dump({**profile, "options": ["--hold"]}))
    wrong = {**software, "modules": ["gcc/99"], "path": str(site.home / "wrong")}
    (place / "bed-env-wrong.yaml").write_text(yaml.safe_dump({**profile, "environment": wrong}))
    return write_wheels(site.home / "wheels")


def words(cluster: str, links: Path, sdist: Path, *more: str) -> list[str]:
    found = ["--find-links", str(links), "--with", str(sdist), "--python", sys.executable]
    return ["env", "build", "--cluster", cluster, *found, *more]


def compilations(site: Site) -> list[Path]:
    """Run directories of the jobs that compiled."""
    return sorted((site.home / "runs").glob("env-build-*"))


def test_a_job_compiles_with_the_modules_and_a_second_environment_takes_its_wheel(site: Site, links: Path) -> None:
    sdist = write_sdist(site.home / "source", 41)
    shown = site.llmctl(*words("bed-env", links, sdist, "--dry-run"))
    assert "5  compile tiny_ext: to do, in a job of bed-env unless its wheel is there" in shown
    assert not compilations(site) and not (site.home / "an env").exists()

    built = site.call(*words("bed-env", links, sdist, "--time", "0:10:00"))
    assert built.returncode == 0, built.stderr
    assert built.stdout == f"{site.home}/an env/bin/python\n"
    (run_dir,) = compilations(site)
    job = json.loads((run_dir / "run.json").read_text())["job"]
    assert job["time_s"] == 600
    log = (run_dir / "attempts/1/node-00000.log").read_text()
    assert "on n" in log and "with 1 compilers" in log, log  # 4 GiB, and 4 GiB for each
    assert set((site.home / "loaded").read_text().split()) & {"n1", "n2", "n3", "n4"}

    again = site.call(*words("bed-env", links, sdist))
    assert again.returncode == 0 and again.stderr.count("done before") == 6, again.stderr
    second = site.call(*words("bed-env", links, sdist, "--path", str(site.home / "second")))
    assert second.returncode == 0 and "compile tiny_ext: the wheel was compiled before" in second.stderr
    assert compilations(site) == [run_dir]

    program = "import tiny_ext; print('answer', tiny_ext.answer())"
    site.submit("uses", "--", "python", "-c", program, cluster="bed-env")
    assert site.ended("uses")["state"] == "completed", site.job_log("uses")
    assert "answer 41" in (site.path("uses") / "attempts/1/node-00000.log").read_text()


def test_a_module_that_is_missing_is_told_with_its_step(site: Site, links: Path) -> None:
    built = site.call(*words("bed-env-wrong", links, site.home / "source/tiny_ext-1.0.tar.gz"))
    assert built.returncode == 3
    assert "step venv failed" in built.stderr and "module load gcc/99 failed" in built.stderr
    assert "set environment.modules and environment.module_init" in built.stderr


def test_a_killed_build_goes_on_with_its_job(site: Site, links: Path) -> None:
    sdist, path, before = write_sdist(site.home / "source", 42), site.home / "killed", compilations(site)
    build = words("bed-env-held", links, sdist, "--path", str(path))
    first = site.start(*build)
    record = path / "llmctl-env.json"
    wait_for(lambda: record.exists() and "run_id" in record.read_text(), "the job")
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=HANG_S)
    (run_dir,) = [found for found in compilations(site) if found not in before]
    second = site.start(*build)
    job_id = site.status(run_dir.name)["job_ids"][-1]
    site.cluster.run("scontrol", "release", job_id)
    output, _ = second.communicate(timeout=HANG_S)
    assert second.returncode == 0, output
    assert [found for found in compilations(site) if found not in before] == [run_dir]
