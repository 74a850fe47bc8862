"""Chains of jobs on a real Slurm: each job submits the next one from its node."""

import pytest

from tests.schedulers.chain.checks import check_budget, check_cancel, check_to_the_end
from tests.schedulers.slurm_site import Site, site
from tests.testbeds.slurm_cluster import slurm_cluster

__all__ = ["site", "slurm_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


def test_a_budget_ends_a_chain(site: Site) -> None:
    check_budget(site, "spent", cluster="bed")


def test_the_waiting_job_of_a_cancelled_chain_is_ended(site: Site) -> None:
    def hold(held: bool) -> None:
        site.cluster.run("scontrol", "update", "partitionname=debug", f"state={'down' if held else 'up'}")

    check_cancel(site, "ended", cluster="bed", hold=hold)


def test_a_training_goes_on_over_time_limits(site: Site) -> None:
    check_to_the_end(site, "long", cluster="bed")
