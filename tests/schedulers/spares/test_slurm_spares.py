"""Spare nodes on a real Slurm: a later attempt leaves a node out, and the losses keep their bits."""

import os
import sys

import pytest

from tests.schedulers.slurm_site import Site, site
from tests.schedulers.spares.checks import (
    SAVES,
    agents_of,
    check_killed_twice,
    end_of,
    nodes_of,
    rank_of,
    wait_for_steps,
)
from tests.testbeds.slurm_cluster import slurm_cluster

__all__ = ["site", "slurm_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
# Three of the four nodes, so that the head is n1 and the spare n3.
SPARE = ("--nodes", "2", "--spare-nodes", "1", "--max-restarts", "3", "--exclude", "n4")
HOOKS = ("--set", "job.code=[faults.py]", "--set", "hooks.lr_function=faults:rate")
SLOW = """
import os, socket, time
from dataclasses import replace
from trainer.preflight import check

whole = check.Instruments

def slow():
    return replace(whole(), speed=lambda device, is_again: whole().speed(device, is_again) / 10)

if socket.gethostname() == os.environ.get("SLOW_NODE"):
    check.Instruments = slow

def rate(step, config):
    time.sleep(0.1)
    return config.optimizer.lr
"""


@pytest.fixture(scope="module")
def losses(site: Site) -> dict[int, float]:
    """Losses of the same training on two nodes to which nothing happens."""
    (site.home / "faults.py").write_text(SLOW)
    site.submit("sound", "--nodes", "2", *SAVES, *HOOKS)
    assert site.ended("sound")["state"] == "completed", site.job_log("sound")
    return site.losses("sound")


@pytest.mark.proof
def test_a_node_that_the_preflight_finds_unfit_is_left_out(site: Site, losses: dict[int, float]) -> None:
    site.submit("unfit", *SPARE, *SAVES, *HOOKS, "--preflight", "quick", "--env", "SLOW_NODE=n2")
    run = site.ended("unfit")
    assert run["state"] == "completed" and run["attempt"] == 2, f"{run}\n{site.job_log('unfit')}"
    assert [nodes_of(site, "unfit", attempt) for attempt in (1, 2)] == [["n1", "n2"], ["n1", "n3"]]
    first = end_of(site, "unfit", 1)
    assert (first["class"], first["first_node"]) == ("node", "n2") and [*dict(first["leaves_out"])] == ["n2"], first
    assert "n2 left out (preflight: node n2 (rank 1): speed of a matrix product" in run["detail"]
    assert run["hosts"] == ["n1", "n3"] and site.losses("unfit") == losses


@pytest.mark.proof
def test_a_node_without_the_python_of_the_job_is_left_out(site: Site, losses: dict[int, float]) -> None:
    python = os.path.realpath(sys.executable)
    site.cluster.on_node("n2", "mount", "--bind", "/dev/null", python)
    try:
        site.submit("unstarted", *SPARE, *SAVES, *HOOKS)
        run = site.ended("unstarted")
    finally:
        site.cluster.on_node("n2", "umount", python)
    assert run["state"] == "completed" and run["attempt"] == 2, f"{run}\n{site.job_log('unstarted')}"
    assert [nodes_of(site, "unstarted", attempt) for attempt in (1, 2)] == [["n1", "n2"], ["n1", "n3"]]
    first = end_of(site, "unstarted", 1)
    assert (first["class"], first["culprits"], first["code"]) == ("node", ["n2"], 126), first
    assert "n2 left out (could not start " in run["detail"] and ": Permission denied)" in run["detail"]
    assert site.losses("unstarted") == losses


@pytest.mark.proof
def test_a_node_without_the_folder_of_the_runs_is_left_out(site: Site, losses: dict[int, float]) -> None:
    runs = str(site.home / "runs")
    site.cluster.on_node("n2", "mount", "-t", "tmpfs", "none", runs)
    try:
        site.submit("unmounted", *SPARE, *SAVES, *HOOKS)
        run = site.ended("unmounted")
    finally:
        site.cluster.on_node("n2", "umount", runs)
    first = end_of(site, "unmounted", 1)
    assert run["state"] == "completed" and run["attempt"] == 2, f"{run}\n{first}\n{site.job_log('unmounted')}"
    assert (first["class"], first["culprits"]) == ("node", ["n2"]), first
    assert "n2 left out (could not start " in run["detail"] and site.losses("unmounted") == losses


def test_a_node_whose_agent_is_killed_twice_is_left_out(site: Site, losses: dict[int, float]) -> None:
    site.submit("agent", *SPARE, *SAVES, *HOOKS)
    check_killed_twice(site, "agent", losses, agents_of)


@pytest.mark.proof
def test_a_node_whose_rank_is_killed_twice_is_left_out(site: Site, losses: dict[int, float]) -> None:
    site.submit("rank", *SPARE, *SAVES, *HOOKS, "--launcher", "srun")
    check_killed_twice(site, "rank", losses, rank_of)


@pytest.mark.proof
def test_a_node_without_power_is_left_out(site: Site, losses: dict[int, float]) -> None:
    site.submit("dark", *SPARE, *SAVES, *HOOKS, "--hang-timeout", "30")
    wait_for_steps(site, "dark", 1)
    site.cluster.cut_power("n2")
    try:
        run = site.ended("dark")
        assert run["state"] == "completed", f"{run}\n{site.job_log('dark')}"
        assert nodes_of(site, "dark", run["attempt"]) == ["n1", "n3"]
        assert "n2 left out (" in run["detail"] and site.losses("dark") == losses
    finally:
        site.cluster.restore_power("n2")
