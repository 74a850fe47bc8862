"""Context: the machines of a cluster, and the place of secrets."""

from pathlib import Path

import pytest

from llmctl.context import Context, is_remote, secrets_file
from llmctl.site.profile import ClusterProfile


@pytest.mark.parametrize(
    ("values", "host", "secrets"),
    [
        ({"scheduler": "slurm"}, "this machine", "/w/r/own/secrets/r.1"),
        ({"scheduler": "sge", "login": {"host": "gate"}}, "gate", "/w/r/own/secrets/r.1"),
        ({"scheduler": "ssh", "hosts": ["a", "b"]}, "a and 1 more", "/w/r/own/secrets/r.1"),
        # The login node is never asked about machines behind ssh: each machine is reached directly.
        ({"scheduler": "ssh", "hosts": ["a"], "login": {"host": "gate"}}, "a", "/w/r/own/secrets/r.1"),
        ({"scheduler": "local"}, "this machine", "/h/.local/state/llmctl/secrets/r.1"),
        ({"scheduler": "local", "login": {"host": "box"}}, "box", "/w/r/own/secrets/r.1"),
    ],
)
def test_the_scheduler_decides_how_a_cluster_is_reached(values, host, secrets):
    context = Context.of(("llmctl",), (), {"HOME": "/h"}, Path("/"))
    profile = ClusterProfile(name="lab", **values)
    assert context.connect(profile).host == host
    assert is_remote(profile) is (host != "this machine")
    assert secrets_file(context, profile, Path("/w/r"), 1) == secrets
    context.close()
    assert context.connections == {}
