"""Replicas whose weights differ by a bit are found and named; equal ones train on. Real ranks."""

from __future__ import annotations

import json
import socket
from datetime import timedelta

import pytest
import torch

from tests.trainer.spawn import DEADLINE_S
from tests.trainer.training.pretraining_job import Job
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.parallel_model import build_model
from trainer.planning.build_config import build_config
from trainer.process.failure import PeerFailedError
from trainer.training.soundness.weight_hashes import ReplicaError, compare_replicas, hash_bits, places_that_differ

KEY = "check_weight_hash_across_dp_replicas_interval"
HOST = socket.gethostname()
FC2, EXPERT = "layers.1.mlp.fc2.weight", "layers.0.moe.experts.fc2.weight"


def config_of(model=None, parallel=None, **training):
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 100, **(model or {})}
    return {
        "model": model,
        "training": {"train_iters": 6, "seq_length": 16, "eval_iters": 0, "device": "cpu", **training},
        "optimizer": {"lr": 1e-3},
        "data": {"mock_data": True},
        "logging": {"log_interval": 1},
        "parallel": parallel or {},
    }


def flip(weight):
    """Flip the lowest bit of the last element."""
    weight.detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def flip_in_third_iteration():
    from trainer.training.loop import TrainingLoop

    whole = TrainingLoop._agree

    def agree(self, *arguments):
        agreed = whole(self, *arguments)
        if self.progress.iteration == 3:
            flip(self.model.parameters[FC2])
        return agreed

    TrainingLoop._agree = agree


def write_config(run, parallel=None, **training):
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(config_of(None, parallel, **training)))


def test_a_flipped_bit_ends_the_run_at_the_next_comparison(tmp_path):
    run = tmp_path / "run"
    write_config(run, **{KEY: 2})
    with Job(run, 2, {1: flip_in_third_iteration}) as job:
        assert job.ends([0, 1]) == [1, 1]
    (record,) = [json.loads(path.read_text()) for path in (run / "attempts/1/errors").glob("rank-*.json")]
    assert (record["type"], record["iteration"], record["exit_code"]) == ("ReplicaError", 4, 1)
    sentence = (
        f"after iteration 4 the weights of rank 0 (pp 0, dp 0, tp 0) on {HOST} and rank 1 (pp 0, dp 1, tp 0) on {HOST} "
        f"differ from each other, first in {FC2}; checkpoints after iteration 2 may hold wrong weights, so go on from "
        "an earlier one, without the machine if it differs again"
    )
    assert record["message"] == sentence
    for rank in range(2):
        log = (run / f"attempts/1/rank-{rank:05d}.log").read_text()
        assert f"trainer: rank {rank} (pp 0, dp {rank}, tp 0): {sentence}\n" in log
        assert "Traceback" not in log


def test_comparisons_of_equal_replicas_change_no_loss(tmp_path):
    losses = []
    for name, training in (("with", {KEY: 1}), ("without", {})):
        # Weights that are still on their way when the comparison begins.
        write_config(tmp_path / name, {"use_distributed_optimizer": True}, **training)
        with Job(tmp_path / name, 2) as job:
            assert job.ends([0, 1]) == [0, 0]
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["lm_loss"] for row in rows if "lm_loss" in row])
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


def compare(rank, world_size, values, name, flipped, iteration):
    """The error's type and message, or None, after a bit of ``name`` has been flipped on the ranks ``flipped``."""
    config = build_config(values)
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    model = build_model(config, 100, mesh, groups, torch.device("cpu"))
    if rank in flipped:
        flip(model.parameters[name])
    try:
        compare_replicas(model, config.training, iteration, torch.device("cpu"))
    except (ReplicaError, PeerFailedError) as error:
        return type(error), str(error)
    return None


MIXTURE = {"num_experts": 4, "moe_ffn_hidden_size": 12}
TP2 = {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True}
EP2 = {"expert_model_parallel_size": 2}
TP4 = {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1, **EP2}


@pytest.mark.parametrize(
    ("model", "parallel", "name", "flipped", "differs"),
    [
        ({}, {}, FC2, (2,), f"rank 2 (pp 0, dp 2, tp 0) on {HOST} differ from those of the other 3 replicas"),
        (
            *({}, TP2, FC2, (3,)),
            f"rank 1 (pp 0, dp 0, tp 1) on {HOST} and rank 3 (pp 0, dp 1, tp 1) on {HOST} differ from each other",
        ),
        (
            *(MIXTURE, EP2, EXPERT, (2,)),
            f"rank 0 (pp 0, dp 0, tp 0, ep 0) on {HOST} and rank 2 (pp 0, dp 2, tp 0, ep 0) on {HOST} differ from each "
            "other",
        ),
        (
            *({**MIXTURE, "num_attention_heads": 4}, TP4, EXPERT, (2,)),
            f"rank 0 (pp 0, dp 0, tp 0, ep 0) on {HOST} and rank 2 (pp 0, dp 0, tp 2, ep 0) on {HOST} differ from each "
            "other",
        ),
    ],
    ids=["dp4", "tp2 dp2", "ep2", "whole experts on tp4"],
)
def test_every_rank_names_those_that_differ(ranks, model, parallel, name, flipped, differs):
    values = config_of(model, parallel, global_batch_size=4, **{KEY: 5})
    found = ranks.run(compare, values, name, flipped, 10)
    assert len(set(message for _, message in found)) == 1
    assert found[0][1].startswith(f"after iteration 10 the weights of {differs}, first in {name}; ")
    first = int(differs.split()[1])
    assert [rank for rank, (kind, _) in enumerate(found) if kind is ReplicaError] == [first]
    assert ranks.run(compare, values, name, flipped, 11) == [None] * 4
    # Ranks whose weights are not copies of each other differ anyway.
    assert ranks.run(compare, values, name, (), 10) == [None] * 4


def test_a_majority_is_more_than_half_of_the_copies():
    one, other, third = [1, 2], [1, 3], [4, 2]
    assert places_that_differ([one, one, one]) == []
    assert places_that_differ([one, other, one]) == [1]
    assert places_that_differ([other, one, third, one, one]) == [0, 2]
    assert places_that_differ([one, other]) == [0, 1]
    assert places_that_differ([one, one, other, third]) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_hash_follows_every_bit_and_every_place(dtype):
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = weight.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)
    hashes = {int(hash_bits(weight))}
    width = 8 * weight.element_size()
    for place in range(15):
        for bit in range(width):
            mask = (1 << bit) - (1 << width if bit == width - 1 else 0)
            bits[place] ^= mask
            hashes.add(int(hash_bits(weight)))
            bits[place] ^= mask
    assert len(hashes) == 1 + 15 * width
    before = int(hash_bits(weight))
    bits[[0, 7]] = bits[[7, 0]]
    assert int(hash_bits(weight)) != before


def test_a_hash_covers_every_chunk_of_a_long_tensor(monkeypatch):
    monkeypatch.setattr("trainer.training.soundness.weight_hashes._CHUNK", 7)
    weight = torch.randn(20, generator=torch.Generator().manual_seed(1))
    hashes = {int(hash_bits(weight))}
    for place in range(20):
        changed = weight.clone()
        flip(changed[place])
        hashes.add(int(hash_bits(changed)))
    # The same numbers, with two chunks in the other order.
    hashes.add(int(hash_bits(torch.cat([weight[7:14], weight[:7], weight[14:]]))))
    assert len(hashes) == 22
