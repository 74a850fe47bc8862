"""``llmctl nodes``: grouped on a terminal, complete in JSON, and a scheduler that does not answer."""

import json
from types import SimpleNamespace

import pytest

from llmctl.backends.base import NodeReport
from llmctl.cli.main import main
from llmctl.context import ClusterSession
from llmctl.errors import ProgramMissing, SchedulerError
from llmctl.operate.nodes import fold_names, group_nodes, read_machine, read_nodes, summarize
from llmctl.transport.host_group import HostGroup
from llmctl.transport.protocol import CommandResult

NODES = (
    "n1|idle||8|0|gpu",
    "n2|idle||8|0|gpu",
    "n10|mixed||8|3|gpu",
    "n3|drained|bad gpu 0: the fan of the second board is loud and (as we hear) Xid 79 came twice|8|0|gpu",
    "n4|down|Not responding|8|0|gpu",
    "c1|allocated||0|0|cpu",
)


def nodes(capsys, *arguments, code=0):
    assert main(["nodes", "--cluster", "scripted", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_nodes_are_grouped_with_whole_reasons_and_a_line_for_each_queue(cluster, capsys):
    cluster.backend.says("nodes", *NODES)
    lines = nodes(capsys).splitlines()
    assert lines[0].split() == ["QUEUES", "STATE", "NODES", "GPUS", "CORES", "MEMORY", "NAMES", "REASON"]
    assert [line.split()[:4] for line in lines[1:6]] == [
        ["cpu", "allocated", "1", "-"],
        ["gpu", "idle", "2", "0/16"],
        ["gpu", "mixed", "1", "3/8"],
        ["gpu", "drained", "1", "0/8"],
        ["gpu", "down", "1", "0/8"],
    ]
    assert "n[1-2]" in lines[2]
    assert lines[4].endswith("bad gpu 0: the fan of the second board is loud and (as we hear) Xid 79 came twice")
    assert lines[6:] == [
        "cpu: 1 node: 1 allocated",
        "gpu: 5 nodes: 2 idle, 1 mixed, 1 drained, 1 down; 3 of 40 GPUs in use, 21 available",
    ]
    assert cluster.backend.calls() == ["nodes "]


def test_json_has_every_node_and_queue(cluster, capsys):
    cluster.backend.says("nodes", *NODES)
    document = json.loads(nodes(capsys, "--json"))
    assert document["cluster"] == "scripted"
    assert [node["name"] for node in document["nodes"]] == ["c1", "n1", "n2", "n3", "n4", "n10"]
    assert document["nodes"][3] == {
        "name": "n3",
        "state": "drained",
        "raw": "DRAINED",
        "reason": "bad gpu 0: the fan of the second board is loud and (as we hear) Xid 79 came twice",
        "gpus": 8,
        "gpus_used": 0,
        "cores": 8,
        "cores_used": None,
        "memory_gib": 64.0,
        "queues": ["gpu"],
    }
    assert document["queues"][1]["gpus_idle"] == 21


def test_a_scheduler_that_does_not_answer_is_an_error(cluster, capsys):
    cluster.backend.fails("nodes", "refused")
    assert nodes(capsys, code=4).endswith("refused; ask the one who wrote this\n")
    cluster.backend.says("nodes")
    assert nodes(capsys) == ""


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["n1"], "n1"),
        (["n2", "n1", "n3", "n7"], "n[1-3,7]"),
        (["gpu-009", "gpu-010", "gpu-011"], "gpu-[009-011]"),
        (["a1-ib", "a2-ib", "b1"], "a[1-2]-ib, b1"),
        (["login", "r1n1", "r1n2", "r2n1"], "login, r1n[1-2], r2n1"),
        (["n1", "n01"], "n1, n01"),
    ],
)
def test_shortened_host_names(names, short):
    assert fold_names(names) == short


def test_unknown_values_are_none():
    found = [NodeReport("n1", "idle", "free"), NodeReport("n2", "unknown", "wedged")]
    (summary,) = summarize(found)
    assert (summary.queue, summary.gpus, summary.gpus_used, summary.gpus_idle) == ("", None, None, None)
    assert [group.names for group in group_nodes(found)] == ["n1", "n2"]


class Machine:
    """A machine with two GPUs, one of them in use."""

    host = "h1"

    def __init__(self, has_gpus=True):
        self._has_gpus = has_gpus

    def run(self, argv, *, timeout_s):
        assert timeout_s < 60
        if argv[0] == "cat":
            text = "h1\n0-3,8-11\n4.00 3.00 2.00 1/200 3\nMemTotal:       16777216 kB\nMemFree:  1 kB\n"
            return CommandResult(0, text, "")
        if not self._has_gpus:
            raise ProgramMissing("nvidia-smi: cannot be started", transient=False)
        return CommandResult(0, "GPU-a\nGPU-b\n" if "--query-gpu=uuid" in argv else "GPU-b\nGPU-b\n", "")


@pytest.mark.usefixtures("home")
def test_a_scheduler_that_is_not_installed_here_says_where_to_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["nodes", "--cluster", "abci3"]) == 4
    assert capsys.readouterr().err == (
        "llmctl: pbsnodes: is not installed on this machine, or not in PATH: run llmctl on a login node of the "
        "cluster, name one as login.host in the cluster's profile, or choose another cluster (llmctl clusters list)\n"
    )


def test_a_machine_without_a_scheduler_reports_its_resources():
    found = read_machine(Machine())
    assert (found.name, found.state, found.gpus, found.gpus_used) == ("h1", "mixed", 2, 1)
    assert (found.cores, found.cores_used, found.memory_gib) == (8, 4, 16.0)
    assert read_machine(Machine(has_gpus=False)).gpus == 0


def test_the_local_cluster_is_one_node(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["nodes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cluster"] == "local"
    assert len(document["nodes"]) == 1
    assert document["nodes"][0]["cores"] > 0


@pytest.mark.parametrize("transient", [True, False], ids=["down", "key changed"])
def test_an_unreachable_host_is_down_and_the_others_are_read(transient):
    class Away(Machine):
        def run(self, *_, **__):
            raise SchedulerError("h2: no route to host\nis it up?", transient=transient)

    profile = SimpleNamespace(scheduler="ssh")
    group = HostGroup({"h1": Machine(), "h2": Away()})
    found = read_nodes(ClusterSession(profile, group, None))
    assert [(node.name, node.state) for node in found] == [("h1", "mixed"), ("h2", "down")]
    hint = " (trying again later can help)" if transient else ""
    assert found[1].reason == f"h2: no route to host; is it up?{hint}"
    with pytest.raises(SchedulerError, match="no route"):
        read_nodes(ClusterSession(profile, HostGroup({"h2": Away()}), None))
