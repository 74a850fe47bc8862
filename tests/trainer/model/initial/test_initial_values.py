"""Weights drawn piece by piece have the bits of one draw, cut to the rank's part."""

import threading
from functools import partial

import pytest
import torch

from tests.waiting import HANG_S
from trainer.distributed.mesh import ParallelMesh
from trainer.distributed.random_streams import seeded_generator
from trainer.model import initial_values
from trainer.model.initial_values import RandomMatrix, fill_all
from trainer.model.sharding import PackedHeads, ParameterLayout
from trainer.planning.build_config import build_config

ADDRESS = ("initial", 3, "layers.0.weight")
# Fewer elements than torch draws at once, the piece itself, one more, and a last piece that would be too short alone.
SIZES = [1, 15, 16, 17, 1007, 65_536, 65_537, 65_551, 65_552, 65_553, 200_003]
SHAPES = {"rows": ((88, 30), 0), "columns": ((45, 88), 1), "middle": ((2, 88, 17), 1), "whole": ((41, 23), None)}


def drawn_at_once(shape, *, is_normal=True):
    whole, generator = torch.empty(shape), seeded_generator("cpu", *ADDRESS)
    if is_normal:
        return whole.normal_(0.0, 0.3, generator=generator)
    return whole.uniform_(-0.3, 0.3, generator=generator)


def filled(shape, layout, mesh, bounds, dtype, *, is_normal=True):
    part = torch.zeros(bounds[1] - bounds[0], dtype=dtype)
    RandomMatrix(ADDRESS, shape, 0.3, is_normal).fill(part, bounds[0], layout.boxes(mesh), dtype)
    return part


def layout_of(shape, tp_dim=None, **further):
    return ParameterLayout("weight", shape, tp_dim, False, False, is_matrix=True, **further)


def mesh_of(tp, rank, groups=8):
    model = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": groups}
    config = build_config(
        {
            "model": model,
            "parallel": {"tensor_model_parallel_size": tp},
            "training": {"train_iters": 1, "seq_length": 8},
            "optimizer": {"lr": 1e-3},
        }
    )
    return ParallelMesh.build(config, rank, tp)


@pytest.mark.parametrize("is_normal", [True, False], ids=["normal", "uniform"])
@pytest.mark.parametrize("size", SIZES)
def test_pieces_have_the_bits_of_one_draw(size, is_normal):
    layout, mesh = layout_of((size,)), mesh_of(1, 0)
    expected = drawn_at_once((size,), is_normal=is_normal)
    for dtype in (torch.float32, torch.bfloat16):
        found = filled((size,), layout, mesh, (0, size), dtype, is_normal=is_normal)
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("piece", [16, 48, 65_536])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_keeps_its_part(monkeypatch, piece, name, tp):
    monkeypatch.setattr(initial_values, "_PIECE", piece)
    shape, tp_dim = SHAPES[name]
    layout, whole = layout_of(shape, tp_dim), drawn_at_once(shape).to(torch.bfloat16)
    for rank in range(tp):
        mesh = mesh_of(tp, rank)
        expected = layout.shard(whole, mesh).view(-1)
        size = len(expected)
        for bounds in ((0, size), (0, size // 3), (size // 3, size // 3 + 2), (size // 3 + 2, size), (size, size)):
            found = filled(shape, layout, mesh, bounds, torch.bfloat16)
            assert torch.equal(found, expected[slice(*bounds)]), (rank, bounds)


@pytest.mark.parametrize("piece", [16, 65_536])
def test_copies_of_key_and_value_heads_have_the_same_values(monkeypatch, piece):
    monkeypatch.setattr(initial_values, "_PIECE", piece)
    heads = PackedHeads(groups=2, queries_per_group=4, head_dim=8)
    shape = (2 * (4 + 2) * 8, 64)
    layout, whole = layout_of(shape, 0, packed_heads=heads), drawn_at_once(shape)
    for rank in range(4):
        mesh = mesh_of(4, rank, groups=2)
        expected = layout.shard(whole, mesh).view(-1)
        for bounds in ((0, len(expected)), (500, len(expected) - 700)):
            assert torch.equal(filled(shape, layout, mesh, bounds, torch.float32), expected[slice(*bounds)])


def test_padding_of_the_vocabulary_is_not_drawn():
    layout, drawn = layout_of((40, 24), 0, valid_rows=33), (33, 24)
    whole = torch.cat((drawn_at_once(drawn), torch.zeros(7, 24)))
    for rank in range(4):
        mesh = mesh_of(4, rank)
        expected = layout.shard(whole, mesh).view(-1)
        assert torch.equal(filled(drawn, layout, mesh, (0, 240), torch.float32), expected)


def test_values_are_rounded_as_the_model_even_in_a_wider_part():
    layout, shape = layout_of((50, 20)), (50, 20)
    part = torch.zeros(1000)
    RandomMatrix(ADDRESS, shape, 0.3, True).fill(part, 0, layout.boxes(mesh_of(1, 0)), torch.bfloat16)
    assert torch.equal(part, drawn_at_once(shape).to(torch.bfloat16).float().view(-1))


def test_nothing_is_drawn_after_the_last_kept_element(monkeypatch):
    monkeypatch.setattr(initial_values, "_PIECE", 16)
    draws = []
    draw = RandomMatrix._draw
    monkeypatch.setattr(RandomMatrix, "_draw", lambda *given: draws.append(1) or draw(*given))
    layout = layout_of((64, 16), 0)
    for rank, expected in enumerate((16, 32, 48, 64)):
        draws.clear()
        filled((64, 16), layout, mesh_of(4, rank), (0, 256), torch.float32)
        assert len(draws) == expected
    draws.clear()
    filled((64, 16), layout, mesh_of(1, 0), (1024, 1024), torch.float32)
    assert draws == []


def test_several_weights_are_drawn_at_once():
    both = threading.Barrier(2, timeout=HANG_S)
    fill_all([both.wait, both.wait], threads=2)


def test_an_error_of_a_draw_reaches_the_start():
    def fail():
        raise MemoryError("no memory")

    with pytest.raises(MemoryError, match="no memory"):
        fill_all([int, fail, int], threads=2)


def test_threads_change_no_bits():
    layouts = {f"layers.{number}": layout_of((300 + number, 257)) for number in range(6)}
    mesh, found = mesh_of(1, 0), {}
    for threads in (1, 3):
        found[threads] = {name: torch.zeros(layouts[name].global_shape).view(-1) for name in layouts}
        fills = [
            partial(RandomMatrix((name,), layouts[name].global_shape, 0.3, True).fill, part, 0, boxes, torch.float32)
            for name, part in found[threads].items()
            for boxes in [layouts[name].boxes(mesh)]
        ]
        fill_all(fills, threads)
    assert all(torch.equal(found[1][name], found[3][name]) for name in layouts)
