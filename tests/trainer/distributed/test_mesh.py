"""Ranks and coordinates, and the process groups of every axis on real ranks."""

import dataclasses
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from trainer.config.errors import ConfigError
from trainer.distributed.mesh import ParallelMesh, ProcessGroups, build_process_groups, has_high_priority
from trainer.planning.build_config import build_config
from trainer.planning.command_line import build_train_config, parse_command_line

AXES = ("tp", "etp", "kv", "cp", "dp_cp", "ep", "expert_dp", "pp", "pp_up", "embedding")
SIZES = [
    {"tp": 1, "pp": 1, "dp": 1},
    {"tp": 2, "pp": 3, "dp": 4},
    {"tp": 4, "pp": 1, "dp": 2, "kv_copies": 2},
    {"tp": 2, "pp": 2, "dp": 2, "cp": 2, "ep": 4},
    {"tp": 1, "pp": 2, "dp": 3, "cp": 4, "ep": 6},
    {"tp": 2, "pp": 3, "dp": 3, "cp": 2, "ep": 6, "pp_before_dp": True},
    {"tp": 1, "pp": 2, "dp": 4, "cp": 2, "ep": 4, "pp_before_dp": True},
    {"tp": 2, "pp": 2, "dp": 3, "cp": 2, "ep": 4, "expert_shares": 2},
    {"tp": 4, "pp": 2, "dp": 2, "ep": 2, "expert_shares": 4, "pp_before_dp": True},
    {"tp": 2, "pp": 1, "dp": 2, "ep": 1, "expert_shares": 2},
    {"tp": 4, "pp": 2, "dp": 2, "cp": 2, "ep": 4, "expert_shares": 2},
]


PP = "pipeline_model_parallel_size"


def config(tp=1, pp=1, model=None, **training):
    return build_config(
        {
            "model": {"num_layers": 4, "hidden_size": 24, "num_attention_heads": 6, **(model or {})},
            "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp},
            "training": {"train_iters": 1, "seq_length": 8, **training},
            "optimizer": {"lr": 1e-3},
        }
    )


def meshes_of(sizes):
    mesh = ParallelMesh(**sizes, rank=0)
    return [mesh.at(rank) for rank in range(mesh.world_size)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_coordinates_and_ranks_are_one_to_one(sizes):
    meshes = meshes_of(sizes)
    assert len({(mesh.tp_rank, mesh.cp_rank, mesh.dp_rank, mesh.pp_rank) for mesh in meshes}) == len(meshes)
    of_expert = {(mesh.expert_tp_rank, mesh.ep_rank, mesh.expert_dp_rank, mesh.pp_rank) for mesh in meshes}
    assert len(of_expert) == len(meshes)
    for mesh in meshes:
        for is_expert, members in ((False, mesh.dp_cp_ranks), (True, mesh.expert_dp_ranks)):
            assert mesh.copies(is_expert) == len(members)
            assert members[mesh.copy_rank(is_expert)] == mesh.rank
        assert mesh.is_first_stage == (mesh.pp_rank == 0)
        assert mesh.computes_loss == (mesh.pp_rank == mesh.pp - 1)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_axis_divides_the_world(sizes):
    meshes = meshes_of(sizes)
    data = meshes[0].dp * meshes[0].cp
    expected = {
        "tp": meshes[0].tp,
        "kv": meshes[0].kv_copies,
        "cp": meshes[0].cp,
        "dp_cp": data,
        "ep": meshes[0].ep,
        "etp": meshes[0].expert_tp,
        "expert_dp": data * meshes[0].expert_shares // meshes[0].ep,
        "pp": meshes[0].pp,
    }
    for axis, size in expected.items():
        groups = {getattr(mesh, f"{axis}_ranks") for mesh in meshes}
        assert all(len(group) == size for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(range(len(meshes)))
        assert all(mesh.rank in getattr(mesh, f"{axis}_ranks") for mesh in meshes)


def test_rank_order_is_tp_then_cp_then_dp_then_pp():
    mesh = ParallelMesh(tp=2, pp=2, dp=2, cp=2, ep=2, rank=13)
    assert (mesh.tp_rank, mesh.cp_rank, mesh.dp_rank, mesh.pp_rank) == (1, 0, 1, 1)
    assert mesh.tp_ranks == (12, 13)
    assert mesh.cp_ranks == (13, 15)
    assert mesh.dp_cp_ranks == (9, 11, 13, 15)
    assert mesh.ep_ranks == (13, 15)
    assert mesh.expert_dp_ranks == (9, 13)
    assert mesh.pp_ranks == mesh.embedding_ranks == (5, 13)
    assert mesh.describe(13) == "rank 13 (pp 1, dp 1, cp 0, tp 1, ep 0)"
    assert ParallelMesh(tp=2, pp=2, dp=3, rank=0).describe(5) == "rank 5 (pp 0, dp 2, tp 1)"


def test_pipelines_may_be_on_neighbouring_ranks():
    mesh = ParallelMesh(tp=2, pp=2, dp=2, cp=2, ep=4, rank=13, pp_before_dp=True)
    assert (mesh.tp_rank, mesh.cp_rank, mesh.dp_rank, mesh.pp_rank) == (1, 0, 1, 1)
    assert mesh.tp_ranks == (12, 13)
    assert mesh.cp_ranks == (13, 15)
    assert mesh.pp_ranks == mesh.embedding_ranks == (9, 13)
    assert mesh.dp_cp_ranks == mesh.ep_ranks == (5, 7, 13, 15)
    assert mesh.expert_dp_ranks == (13,)
    built = build_config({**config(pp=2).model_dump(), "parallel": {PP: 2, "rank_order": "tp-cp-ep-pp-dp"}})
    assert ParallelMesh.build(built, 1, 4) == ParallelMesh(tp=1, pp=2, dp=2, rank=1, pp_before_dp=True)


def test_a_pipeline_may_compute_the_loss_where_it_begins():
    mesh = ParallelMesh(tp=1, pp=4, dp=1, rank=0, loss_pp_rank=-4)
    assert [mesh.at(rank).computes_loss for rank in range(4)] == [True, False, False, False]
    assert mesh.embedding_ranks == (0,)


def test_embedding_and_head_that_share_no_table_share_no_group():
    mesh = ParallelMesh(tp=2, pp=3, dp=1, rank=3, tied_table=False)
    assert mesh.embedding_ranks == (1,)
    untied = config(tp=2, pp=2, model={"untie_embeddings_and_output_weights": True})
    assert ParallelMesh.build(untied, 3, 8) == ParallelMesh(tp=2, pp=2, dp=2, rank=3, tied_table=False)


def test_mesh_of_a_config():
    assert ParallelMesh.build(config(tp=2, pp=2), 3, 8) == ParallelMesh(tp=2, pp=2, dp=2, rank=3)
    with pytest.raises(ConfigError, match="does not divide the world size 6"):
        ParallelMesh.build(config(tp=2, pp=2), 0, 6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelMesh(tp=1, pp=1, dp=1, rank=0).rank = 1


def test_groups_with_streams_of_high_priority_are_read():
    flags = ["--num-layers", "2", "--hidden-size", "24", "--num-attention-heads", "6", "--seq-length", "8"]
    flags += ["--train-iters", "1", "--lr", "1e-3", "--mock-data", "--high-priority-stream-groups"]
    found = build_train_config(parse_command_line([*flags, "ep", "tp"]))
    assert found.parallel.high_priority_stream_groups == ["ep", "tp"]
    with pytest.raises(ConfigError) as caught:
        build_train_config(parse_command_line([*flags, "mp"]))
    assert caught.value.key.startswith("parallel.high_priority_stream_groups")


def test_messages_inside_a_layer_have_the_streams_of_high_priority():
    chosen = config().parallel.high_priority_stream_groups
    groups = [field.name for field in dataclasses.fields(ProcessGroups)]
    assert {name for name in groups if has_high_priority(name, "nccl", chosen)} == {
        *("tp", "kv", "cp", "ep", "pp", "pp_up")
    }
    assert {name for name in groups if has_high_priority(name, "nccl", ["dp"])} == {"dp_cp", "expert_dp"}
    assert not any(has_high_priority(name, backend, chosen) for name in groups for backend in ("gloo", "fake"))
    assert not any(has_high_priority(name, "nccl", []) for name in groups)


@pytest.mark.parametrize(("backend", "expected"), [("nccl", {"tp": True, "pp": True}), ("gloo", {})])
def test_only_groups_of_nccl_have_options(monkeypatch, backend, expected):
    """Each has its own, with the timeout of the group: torch completes them, and warns of another timeout."""

    class Options:
        def __init__(self, is_high_priority_stream):
            self.is_high = is_high_priority_stream

    made = []

    def new_group(_, timeout, pg_options, group_desc):
        if pg_options is not None:
            assert pg_options._timeout == timeout
            made.append((group_desc, pg_options))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend", lambda *_: backend)
    build_process_groups(ParallelMesh(tp=2, pp=2, dp=2, rank=0), timedelta(seconds=7), ["tp", "pp"])
    assert {name: options.is_high for name, options in made if name != "pp_up"} == expected
    assert len({id(options) for _, options in made}) == len(made)


def members_and_sums(rank, _world_size, sizes):
    mesh = ParallelMesh(**sizes, rank=rank)
    groups = build_process_groups(mesh, timedelta(seconds=60))
    found = {}
    for axis in AXES:
        group = getattr(groups, axis)
        if group is not None:
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=group)
            found[axis] = (tuple(dist.get_process_group_ranks(group)), int(total))
    assert groups.copies(False) is groups.dp_cp
    assert groups.copies(True) is groups.expert_dp
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "pp": 2, "dp": 1},
        {"tp": 1, "pp": 4, "dp": 1},
        {"tp": 1, "pp": 4, "dp": 1, "tied_table": False},
        {"tp": 2, "pp": 1, "dp": 2},
        {"tp": 1, "pp": 1, "dp": 2},
        {"tp": 1, "pp": 1, "dp": 2, "cp": 2, "ep": 2},
        {"tp": 1, "pp": 2, "dp": 2, "pp_before_dp": True},
        {"tp": 4, "pp": 1, "dp": 1, "kv_copies": 2},
        {"tp": 1, "pp": 1, "dp": 1},
    ],
    ids=str,
)
def test_groups_hold_the_ranks_of_each_axis(ranks, sizes):
    # The default group may have ranks beyond the mesh.
    for rank, found in enumerate(ranks.run(members_and_sums, sizes)):
        mesh = ParallelMesh(**sizes, rank=rank)
        for axis in AXES:
            members = getattr(mesh, f"{axis.removesuffix('_up')}_ranks")
            if rank in members and len(members) > 1 and rank < mesh.world_size:
                assert found[axis] == (members, sum(members))
            else:
                assert axis not in found


def groups_made(_rank, _world_size, sizes):
    """Number of the job's groups, and this rank's axes that share a group."""
    made, new_group = [], dist.new_group

    def counting(ranks, **options):
        made.append(tuple(ranks))
        return new_group(ranks, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", counting)
        groups = build_process_groups(ParallelMesh(**sizes, rank=dist.get_rank()), timedelta(seconds=60))
    return len(made), groups.expert_dp is groups.dp_cp, groups.cp is None or groups.cp is not groups.dp_cp


@pytest.mark.parametrize(
    ("sizes", "count", "is_shared"),
    [
        ({"tp": 1, "pp": 1, "dp": 4}, 1, True),
        ({"tp": 2, "pp": 1, "dp": 2}, 4, True),
        ({"tp": 1, "pp": 4, "dp": 1}, 2, True),
        ({"tp": 1, "pp": 4, "dp": 1, "tied_table": False}, 1, True),
        # The ring's messages do not queue behind gradients.
        ({"tp": 1, "pp": 1, "dp": 1, "cp": 4}, 2, True),
        ({"tp": 1, "pp": 1, "dp": 4, "ep": 2}, 5, False),
    ],
)
def test_experts_that_are_not_divided_use_the_group_of_the_dense_parameters(ranks, sizes, count, is_shared):
    assert ranks.run(groups_made, sizes) == [(count, is_shared, True)] * 4
