"""Spare nodes on a real Grid Engine."""

from collections.abc import Iterator

import pytest

from tests.schedulers.sge_site import SgeSite
from tests.schedulers.spares.checks import SAVES, agents_of, check_killed_twice, nodes_of, wait_for_steps
from tests.testbeds.sge_cluster import SgeCluster, sge_cluster

__all__ = ["sge_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
TRAIN = ("--nodes", "2", "--gpus-per-node", "1", "--launcher", "torchrun", "--set", "training.device=cpu", *SAVES)
SPARE = ("--spare-nodes", "1", "--max-restarts", "3")


@pytest.fixture(scope="module")
def site(sge_cluster: SgeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SgeSite]:
    site = SgeSite(sge_cluster, tmp_path_factory.mktemp("sge"))
    site.prepare()
    yield site
    sge_cluster.run("qdel", "-u", "*")


@pytest.fixture(scope="module")
def losses(site: SgeSite) -> dict[int, float]:
    """Losses of the same training on two nodes to which nothing happens."""
    site.submit("sound", *TRAIN, cluster="abci")
    assert site.ended("sound")["state"] == "completed", site.job_log("sound")
    return site.losses("sound")


@pytest.mark.proof
def test_a_node_whose_agent_is_killed_twice_is_left_out(site: SgeSite, losses: dict[int, float]) -> None:
    site.submit("twice", *TRAIN, *SPARE, cluster="abci")
    check_killed_twice(site, "twice", losses, agents_of)


@pytest.mark.proof
def test_a_node_without_power_is_left_out(site: SgeSite, losses: dict[int, float]) -> None:
    site.submit("dark", *TRAIN, *SPARE, "--hang-timeout", "30", cluster="abci")
    wait_for_steps(site, "dark", 1)
    bad = nodes_of(site, "dark", 1)[1]
    site.cluster.cut_power(bad)
    try:
        run = site.ended("dark")
        assert run["state"] == "completed", f"{run}\n{site.job_log('dark')}"
        assert bad not in nodes_of(site, "dark", run["attempt"])
        assert f"{bad} left out (" in run["detail"] and site.losses("dark") == losses
    finally:
        site.cluster.restore_power(bad)
