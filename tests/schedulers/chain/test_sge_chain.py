"""Chains of jobs on a real Grid Engine: each job submits the next one from its node."""

from collections.abc import Iterator

import pytest
import yaml

from tests.schedulers.chain.checks import check_budget, check_cancel, check_to_the_end
from tests.schedulers.sge_site import SgeSite
from tests.testbeds.sge_cluster import SgeCluster, sge_cluster

__all__ = ["sge_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
HOSTS = ("g0001", "g0002", "g0003", "g0004")
ONE = ("--nodes", "1", "--gpus-per-node", "1")


@pytest.fixture(scope="module")
def site(sge_cluster: SgeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SgeSite]:
    site = SgeSite(sge_cluster, tmp_path_factory.mktemp("sge"))
    site.prepare()
    # Nodes that may submit jobs, and a PATH with the site's qsub, which knows -g.
    sge_cluster.run("qconf", "-as", ",".join(HOSTS))
    overlay = site.home / ".config/llmctl/clusters/abci.yaml"
    overlay.write_text(yaml.safe_dump({**yaml.safe_load(overlay.read_text()), "options": ["-v PATH"]}))
    yield site
    sge_cluster.run("qdel", "-u", "*")


def test_a_budget_ends_a_chain(site: SgeSite) -> None:
    check_budget(site, "spent", *ONE, cluster="abci")


@pytest.mark.proof
def test_the_waiting_job_of_a_cancelled_chain_is_ended(site: SgeSite) -> None:
    def hold(held: bool) -> None:
        site.cluster.run("qmod", "-d" if held else "-e", "*")

    check_cancel(site, "ended", *ONE, cluster="abci", hold=hold)


@pytest.mark.proof
def test_a_training_goes_on_over_time_limits(site: SgeSite) -> None:
    check_to_the_end(site, "long", *ONE, "--launcher", "torchrun", "--set", "training.device=cpu", cluster="abci")
