"""Groups of ranks, the combination of what they measured, and failures. Pure, apart from one process without peers."""

from __future__ import annotations

import json

import pytest
import torch

from trainer.process.launch_environment import LaunchEnvironment
from trainer.process.run_directory import RunDirectory
from trainer.speed_test import command
from trainer.speed_test.messages import group_members
from trainer.speed_test.sample import RankReport, Sample, combine
from trainer.speed_test.sizes import CPU, GPU


@pytest.mark.parametrize(
    ("firsts", "found"),
    [
        ([True], {}),
        ([True, False], {"node": [[0, 1]]}),
        ([True, True], {"one per node": [[0, 1]]}),
        ([True, False, True, False], {"node": [[0, 1], [2, 3]], "one per node": [[0, 2]], "all": [[0, 1, 2, 3]]}),
        # A node with one rank has no messages within.
        ([True, False, True], {"one per node": [[0, 2]], "all": [[0, 1, 2]]}),
    ],
)
def test_groups_of_the_same_ranks_are_measured_once(firsts, found):
    assert group_members(firsts) == found


def test_the_median_of_the_devices_counts_and_the_slowest_is_named():
    times = {"n1": 2.0, "n2": 9.0, "n3": 3.0}
    reports = [
        RankReport(host, True, "D", None, (Sample("product", "bfloat16", 60.0, seconds, 5, shape=(1, 5, 6)),))
        for host, seconds in times.items()
    ]
    (one,) = combine(reports)
    assert (one["seconds"], one["rate"], one["slowest_seconds"], one["slowest_host"]) == (3.0, 20.0, 9.0, "n2")
    assert (one["shape"], one["bytes"], one["group"], one["ranks"]) == ([1, 5, 6], None, "device", 1)


@pytest.mark.parametrize("sizes", [GPU, CPU])
def test_the_sizes_are_those_of_transformers(sizes):
    assert len(set(sizes.products)) == len(sizes.products) >= 5
    assert all(512 <= k <= 16384 for _, _, k in sizes.products)
    assert {width for *_, width in sizes.attentions} == {64, 128}
    assert sizes.messages == tuple(sorted(sizes.messages))


def test_a_failure_names_the_step_and_the_cause(tmp_path, monkeypatch, capsys):
    def lost(*_: object) -> None:
        raise RuntimeError("the link\nis down")

    monkeypatch.setattr(command, "join_ranks", lost)
    run = RunDirectory(tmp_path)
    assert command.main([], LaunchEnvironment(gpus_per_node=0), run, {}) == 1
    record = json.loads(run.error(0).read_text())
    assert record["message"] == "rendezvous: RuntimeError: the link is down"
    seen = capsys.readouterr()
    assert seen.out == "bench: rendezvous\n" and record["message"] in seen.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("[/a/pair.cc:553] Connection closed by peer [n2]:1. This is typically caused by", "another rank has ended: "),
        ("Timed out waiting 180000ms for recv", "another rank does not answer: "),
    ],
)
def test_a_rank_that_lost_a_peer_is_not_the_cause(tmp_path, monkeypatch, words, told):
    def lost(*_: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(command, "join_ranks", lost)
    run = RunDirectory(tmp_path)
    assert command.main([], LaunchEnvironment(world_size=2, gpus_per_node=0), run, {}) == 1
    record = json.loads(run.error(0).read_text())
    assert record["consequence"] and record["message"].startswith(f"rendezvous: {told}")
    assert "pair.cc" not in record["message"] and "typically" not in record["message"]


def test_a_job_with_gpus_does_not_measure_the_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = RunDirectory(tmp_path)
    assert command.main([], LaunchEnvironment(gpus_per_node=4), run, {}) == 3
    record = json.loads(run.error(0).read_text())
    assert record["message"].startswith("device: GPUs: the job has 4 GPUs per node, but torch ")
    assert record["message"].endswith("; llmctl doctor checks the torch of the jobs") and not capsys.readouterr().out
