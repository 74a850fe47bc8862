"""``llmctl env bench`` on machines behind a jump host, which share a folder or nothing."""

import json
from collections.abc import Iterator

import pytest

from tests.schedulers.ssh_site import Site
from tests.testbeds.ssh_hosts import SshHosts, ssh_hosts

__all__ = ["ssh_hosts"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def site(ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(ssh_hosts, tmp_path_factory.mktemp("user"))
    site.prepare()
    yield site
    assert not ssh_hosts.processes(str(ssh_hosts.shared / "runs")), "something is still running"


@pytest.mark.parametrize("cluster", ["lab", pytest.param("apart", marks=pytest.mark.proof)])
def test_two_hosts_are_measured_and_the_result_is_here(site: Site, cluster: str) -> None:
    done = site.call("env", "bench", "--cluster", cluster, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["cluster"], document["hosts"]) == (cluster, ["h1", "h2"])
    assert {(one["group"], one["ranks"]) for one in document["measurements"]} == {("device", 1), ("one per node", 2)}
    assert json.loads((site.home / f".local/state/llmctl/hardware/{cluster}.json").read_text()) == document
