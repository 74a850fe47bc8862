"""``llmctl env bench`` on a real Grid Engine: two nodes without GPUs."""

import json
from collections.abc import Iterator

import pytest

from tests.schedulers.sge_site import SgeSite
from tests.testbeds.sge_cluster import SgeCluster, sge_cluster

__all__ = ["sge_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def site(sge_cluster: SgeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SgeSite]:
    site = SgeSite(sge_cluster, tmp_path_factory.mktemp("sge"))
    # A kind of node of which a job can have several, on machines without GPUs.
    kinds = {"rt_F": {"gpus": 0, "gpu": None, "gpu_memory_gib": None, "cores": 40}}
    site.write_overlay(site.home, group=sge_cluster.groups[0], resource_types=kinds)
    yield site
    sge_cluster.run("qdel", "-u", "*")


def test_two_nodes_are_measured(site: SgeSite) -> None:
    words = ("env", "bench", "--cluster", "abci", "--time", "0:20:00", "--json")
    document = json.loads(site.llmctl(*words))
    assert (document["cluster"], document["nodes"], document["devices_per_node"]) == ("abci", 2, 1)
    assert len(set(document["hosts"])) == 2
    assert {(one["group"], one["ranks"]) for one in document["measurements"]} == {("device", 1), ("one per node", 2)}
    assert site.status(document["run_id"])["state"] == "completed"
