"""``llmctl env bench`` on this machine: a real job of two nodes, its kept result, and what bad input is told."""

import json
import os

import pytest

from llmctl.cli.main import main
from llmctl.context import Context
from llmctl.errors import RecordError
from llmctl.submit.preview.hardware import measured_file, measured_hardware

NODES = ("env", "bench", "--nodes", "2")


@pytest.fixture
def context(home):  # noqa: ARG001 - of this user
    """The context of a call of the user."""
    return Context.of((), (), os.environ)


def runs_of(home):
    return sorted(path.name for path in (home / "runs").glob("bench-local-*"))


def test_the_result_is_kept_and_the_same_command_comes_back_to_it(home, context, capfd):
    assert main([*NODES, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    (run_id,) = runs_of(home)
    assert (document["run_id"], document["cluster"], document["nodes"]) == (run_id, "local", 2)
    assert {one["what"] for one in document["measurements"]} >= {"product", "copy", "launch", "all-reduce", "send"}
    assert measured_hardware(context.folders, "local") == document

    # The document was lost before it was kept, as after Ctrl-C: the command goes on with its run.
    measured_file(context.folders, "local").unlink()
    assert main([*NODES, "--json"]) == 0
    seen = capfd.readouterr()
    assert json.loads(seen.out) == document and f"going on with {run_id}" in seen.err
    assert main([*NODES]) == 0
    seen = capfd.readouterr()
    assert f"measured by {run_id} before; --again measures anew" in seen.err
    head, hosts, columns, *rows = seen.out.splitlines()
    assert head.startswith("local: 2 nodes x 1 CPU, torch ") and run_id in hosts and columns.startswith("MEASUREMENT")
    assert len(rows) == len(document["measurements"]) and runs_of(home) == [run_id]


def test_a_failed_run_names_its_step_and_the_same_command_starts_a_new_one(home, monkeypatch, capfd):
    # The trainer finds no such interface on the nodes.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    for _ in range(2):
        assert main([*NODES]) != 0
        told = capfd.readouterr().err
        assert "rank" in told and "rendezvous: " in told and "nowhere0" in told
    assert len(runs_of(home)) == 2


def test_a_dry_run_starts_nothing(home, capfd):
    assert main(["env", "bench", "--dry-run"]) == 0
    assert "1 node x 1 rank on this machine (local)" in capfd.readouterr().out
    assert main([*NODES, "--show-script"]) == 0
    assert "bench" in capfd.readouterr().out
    assert not (home / "runs").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--cluster", "nowhere"), "no cluster is called 'nowhere'"),
        (("--nodes", "0"), "--nodes"),
        (("--gpus-per-node", "-1"), "--gpus-per-node"),
        (("--time", "soon"), "--time"),
        (("--resource-type", "large"), "--resource-type"),
    ],
)
def test_bad_input_is_told(home, capfd, words, told):
    assert main(["env", "bench", *words]) in (2, 3)
    seen = capfd.readouterr()
    assert told in seen.err and "Traceback" not in seen.err and not seen.out
    assert not (home / "runs").exists()


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (("--cluster", "local"), 1),
        (("--cluster", "abci", "--resource-type", "rt_C.small"), 1),
        (("--cluster", "abci"), 2),
        (("--cluster", "abci", "--nodes", "3"), 3),
    ],
)
def test_two_nodes_are_the_default_where_a_job_can_have_them(home, capfd, words, nodes):  # noqa: ARG001 - of this user
    assert main(["env", "bench", *words, "--dry-run"]) == 0
    assert f"{nodes} node" in capfd.readouterr().out


def test_a_part_of_a_node_is_measured_alone_without_a_limit_of_nodes(home, capfd):
    overlay = home / "config/llmctl/clusters/abci.yaml"
    overlay.parent.mkdir(parents=True)
    overlay.write_text('{"resource_types": {"rt_C.small": {"max_nodes": null}}}')
    assert main(["env", "bench", "--cluster", "abci", "--resource-type", "rt_C.small", "--dry-run"]) == 0
    assert "1 node" in capfd.readouterr().out


def damaged_documents():
    """Documents of the right version, each with one fault."""
    texts = ("date", "cluster", "run_id", "device", "torch", "backend")
    whole = {
        "schema": 1,
        **dict.fromkeys(texts, "x"),
        **dict.fromkeys(("nodes", "devices_per_node"), 1),
        **dict.fromkeys(("cuda", "device_memory_bytes"), None),
        **dict.fromkeys(("hosts", "measurements"), ()),
    }
    yield "{"
    yield json.dumps({**whole, "hosts": "n1"})
    yield json.dumps({name: value for name, value in whole.items() if name != "backend"})
    yield json.dumps({**whole, "measurements": [{"what": "product"}]})


@pytest.mark.parametrize("text", [*damaged_documents()])
def test_a_damaged_file_is_told(context, text):
    path = measured_file(context.folders, "local")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(RecordError, match=r"local.json: is damaged: "):
        measured_hardware(context.folders, "local")


def test_a_cluster_without_a_file_or_with_one_of_another_version_has_no_measurement(context):
    path = measured_file(context.folders, "local")
    assert measured_hardware(context.folders, "local") is None
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 99}')
    assert measured_hardware(context.folders, "local") is None
    # No name leads to another folder.
    (path.parent.parent / "local.json").write_text("{")
    assert measured_hardware(context.folders, "../local") is None
