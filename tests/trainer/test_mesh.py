"""Ranks and coordinates, and the process groups of every axis on real ranks."""

import dataclasses
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.trainer.spawn import Ranks
from trainer.config import ConfigError, build_config
from trainer.mesh import ParallelMesh, build_process_groups

AXES = ("tp", "pp", "dp", "embedding", "model_parallel")
SIZES = [(tp, pp, dp) for tp in (1, 2, 3) for pp in (1, 2, 4) for dp in (1, 2, 3)]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


def config(tp=1, pp=1, **training):
    return build_config(
        {
            "model": {"num_layers": 4, "hidden_size": 24, "num_attention_heads": 6},
            "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp},
            "training": {"train_iters": 1, "seq_length": 8, **training},
            "optimizer": {"lr": 1e-3},
        }
    )


@pytest.mark.parametrize(("tp", "pp", "dp"), SIZES)
def test_coordinates_and_ranks_are_one_to_one(tp, pp, dp):
    meshes = [ParallelMesh(tp=tp, pp=pp, dp=dp, rank=rank) for rank in range(tp * pp * dp)]
    assert len({(mesh.tp_rank, mesh.dp_rank, mesh.pp_rank) for mesh in meshes}) == meshes[0].world_size
    for mesh in meshes:
        place = {"tp_rank": mesh.tp_rank, "dp_rank": mesh.dp_rank, "pp_rank": mesh.pp_rank}
        assert mesh.rank_at(**place) == mesh.rank
        assert mesh.is_first_stage == (mesh.pp_rank == 0)
        assert mesh.is_last_stage == (mesh.pp_rank == pp - 1)


@pytest.mark.parametrize(("tp", "pp", "dp"), SIZES)
def test_each_axis_divides_the_world(tp, pp, dp):
    mesh = ParallelMesh(tp=tp, pp=pp, dp=dp, rank=0)
    for axis, size in {"tp": tp, "pp": pp, "dp": dp, "model_parallel": tp * pp}.items():
        groups = {getattr(mesh.at(rank), f"{axis}_ranks") for rank in range(mesh.world_size)}
        assert all(len(group) == size for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert all(rank in getattr(mesh.at(rank), f"{axis}_ranks") for rank in range(mesh.world_size))


def test_rank_order_is_tp_then_dp_then_pp():
    mesh = ParallelMesh(tp=2, pp=2, dp=3, rank=9)
    assert (mesh.tp_rank, mesh.dp_rank, mesh.pp_rank) == (1, 1, 1)
    assert mesh.tp_ranks == (8, 9)
    assert mesh.dp_ranks == (7, 9, 11)
    assert mesh.pp_ranks == mesh.embedding_ranks == (3, 9)
    assert mesh.model_parallel_ranks == (2, 3, 8, 9)
    assert mesh.describe(5) == "rank 5 (pp 0, dp 2, tp 1)"


def test_mesh_of_a_config():
    assert ParallelMesh.build(config(tp=2, pp=2), 3, 8) == ParallelMesh(tp=2, pp=2, dp=2, rank=3)
    with pytest.raises(ConfigError, match="does not divide the world size 6"):
        ParallelMesh.build(config(tp=2, pp=2), 0, 6)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelMesh(tp=1, pp=1, dp=1, rank=0).rank = 1


def members_and_sums(rank, _world_size, tp, pp, dp, places):
    mesh = ParallelMesh(tp=tp, pp=pp, dp=dp, rank=places.index(rank) if rank in places else 0)
    groups = build_process_groups(mesh, timedelta(seconds=60), places)
    found = {}
    for axis in AXES:
        group = getattr(groups, axis)
        if group is not None:
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=group)
            found[axis] = (tuple(dist.get_process_group_ranks(group)), int(total))
    return found


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "places"),
    [(2, 2, 1, (0, 1, 2, 3)), (1, 4, 1, (0, 1, 2, 3)), (2, 1, 2, (3, 1, 0, 2)), (1, 1, 2, (1, 3)), (1, 1, 1, (2,))],
)
def test_groups_hold_the_ranks_of_each_axis(ranks, tp, pp, dp, places):
    results = ranks.run(members_and_sums, tp, pp, dp, places)
    for rank, found in enumerate(results):
        if rank not in places:
            assert not found
            continue
        mesh = ParallelMesh(tp=tp, pp=pp, dp=dp, rank=places.index(rank))
        for axis in AXES:
            members = tuple(places[member] for member in getattr(mesh, f"{axis}_ranks"))
            if axis == "embedding" and rank not in members:
                members = ()
            if len(members) > 1:
                assert set(found[axis][0]) == set(members)
                assert found[axis][1] == sum(members)
            else:
                assert axis not in found


def test_places_must_be_as_many_as_the_mesh():
    with pytest.raises(ValueError, match="a mesh of 4 ranks cannot lie on"):
        build_process_groups(ParallelMesh(tp=2, pp=2, dp=1, rank=0), timedelta(seconds=1), (0, 1, 1, 2))
