"""The short form of ``make faults`` on a real Slurm."""

import pytest

from tests.faults.beds import prepared
from tests.faults.kinds import BY_NAME
from tests.faults.trial import Trial
from tests.schedulers.slurm_site import Site
from tests.testbeds.slurm_cluster import SlurmCluster, slurm_cluster

__all__ = ["slurm_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", ["by-hand"])
def test_a_fault_of_slurm(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    bed = prepared("slurm", Site(slurm_cluster, tmp_path_factory.mktemp("faults")), ("--cluster", "bed"))
    result = Trial(bed, BY_NAME[name], 1).run()
    assert result.is_good, result.line()
