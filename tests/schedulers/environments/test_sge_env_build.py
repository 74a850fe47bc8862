"""``llmctl env build`` on a real Grid Engine: a job on a part of a node compiles with the modules."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.llmctl.operate.environment.made_wheels import write_sdist
from tests.schedulers.environments.module_system import write_modules, write_wheels
from tests.schedulers.sge_site import SgeSite
from tests.testbeds.sge_cluster import SgeCluster, sge_cluster

__all__ = ["sge_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
HOSTS = {"g0001", "g0002", "g0003", "g0004"}
ON_A_PART = ("--resource-type", "rt_C.small")


@pytest.fixture(scope="module")
def site(sge_cluster: SgeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SgeSite]:
    site = SgeSite(sge_cluster, tmp_path_factory.mktemp("sge"))
    init, path = write_modules(site.home), str(site.home / "an env")
    software = {"modules": ["gcc/12"], "module_init": str(init), "kind": "venv", "path": path}
    site.write_overlay(site.home, group=sge_cluster.groups[0], environment=software)
    yield site
    sge_cluster.run("qdel", "-u", "*")


def build(site: SgeSite, sdist: Path, *more: str) -> "tuple[int, str]":
    """Exit status and standard error of a build, with wheels of the home only."""
    links = ("--find-links", str(site.home / "wheels"), "--python", sys.executable)
    done = site.call("env", "build", "--cluster", "abci", *links, "--with", str(sdist), *more)
    return done.returncode, done.stderr


def compilations(site: SgeSite) -> list[Path]:
    """Run directories of the jobs that compiled."""
    return sorted((site.home / "runs").glob("env-build-*"))


@pytest.mark.proof
def test_a_job_compiles_with_the_modules_and_jobs_use_the_environment(site: SgeSite) -> None:
    write_wheels(site.home / "wheels")
    sdist = write_sdist(site.home / "source", 43)
    status, said = build(site, sdist, *ON_A_PART, "--time", "0:10:00")
    assert status == 0, said
    (run_dir,) = compilations(site)
    log = (run_dir / "attempts/1/node-00000.log").read_text()
    # 30 GiB of memory have room for seven compilers; the part of a node has five cores, and a machine may have fewer.
    assert re.search(r"^on g000\d, with [1-5] compilers$", log, re.MULTILINE), log
    assert set((site.home / "loaded").read_text().split()) & HOSTS

    status, again = build(site, sdist, *ON_A_PART, "--path", str(site.home / "second"))
    assert status == 0 and "compile tiny_ext: the wheel was compiled before" in again, again
    assert compilations(site) == [run_dir]

    program = "import tiny_ext; print('answer', tiny_ext.answer())"
    site.submit("uses", *ON_A_PART, "--", "python", "-c", program, cluster="abci")
    assert site.ended("uses")["state"] == "completed", site.job_log("uses")
    assert "answer 43" in (site.path("uses") / "attempts/1/node-00000.log").read_text()


def test_a_source_that_does_not_compile_is_told_with_its_last_lines(site: SgeSite) -> None:
    write_wheels(site.home / "wheels")
    sdist = write_sdist(site.home / "broken", "not a number")
    # In its own environment: the job does without the profile's, which may not be there.
    status, said = build(site, sdist, *ON_A_PART, "--path", str(site.home / "broken env"))
    assert status != 0 and "step compile tiny_ext failed" in said, said
    assert "not" in said and "error" in said, said
