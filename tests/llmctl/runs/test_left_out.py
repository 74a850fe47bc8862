"""Status of an attempt that does without a node of its job."""

import json

import pytest

from llmctl.cli.main import main
from llmctl.runs.facts import parse_started
from tests.llmctl.run_directories import beat


def test_status_names_the_node_left_out_and_the_cause(cluster, capsys):
    made = cluster.run()
    beat(made.start_attempt(left_out={"n3": "two failures in a row began there"}), 0, age_s=1)
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    assert main(["status", made.record.run_id, "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert "n3 left out (two failures in a row began there)" in run["detail"]


@pytest.mark.parametrize(
    ("value", "read"), [({"n3": "slow\nmore", "n4": 7}, {"n3": "slow"}), (["n3"], {}), (None, {}), ("n3", {})]
)
def test_hostile_values_of_nodes_left_out_are_ignored(value, read):
    started = parse_started(json.dumps({"left_out": value}).encode())
    assert started is not None and started.left_out == read
