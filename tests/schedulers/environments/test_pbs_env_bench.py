"""``llmctl env bench`` on the stand-in for PBS: two nodes, which are two names of this machine."""

import json

import yaml

from llmctl.cli.main import main
from tests.schedulers.test_pbs_standin import site

__all__ = ["site"]


def test_two_nodes_are_measured(site, tmp_path, capfd):
    overlay = tmp_path / "config/llmctl/clusters/abci3.yaml"
    kinds = {"rt_HF": {"gpus": 0, "gpu": None, "gpu_memory_gib": None}}
    overlay.write_text(yaml.safe_dump({**yaml.safe_load(overlay.read_text()), "resource_types": kinds}))
    capfd.readouterr()
    code = main(["env", "bench", "--cluster", "abci3", "--json"])
    seen = capfd.readouterr()
    assert code == 0, seen.err
    document = json.loads(seen.out)
    assert (document["nodes"], document["devices_per_node"], document["cluster"]) == (2, 1, "abci3")
    assert {(one["group"], one["ranks"]) for one in document["measurements"]} == {("device", 1), ("one per node", 2)}
    assert site.view(document["run_id"])["state"] == "completed" and len(site.jobs()) == 1
