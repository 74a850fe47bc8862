"""Ring and Ulysses attention on real ranks against dense attention; messages and load."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.model import dense_attention as dense
from trainer.config.sections.model import ModelConfig
from trainer.data.samples.document_places import Documents
from trainer.distributed.collectives import message_device
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.model.attention.core_attention import AttentionCore, attend
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.context_parallel import ring, ulysses
from trainer.model.context_parallel.axis import ContextParallel
from trainer.ops.attention.backend import choose_backend
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.tiled import TileAttention
from trainer.ops.attention.tiles import CAUSAL, Tile, ring_chunks, ring_tiles, whole_tiles
from trainer.ops.attention.unfused import Unfused, outside
from trainer.planning.sequence_division import CommunicationType

CPU = torch.device("cpu")
LENGTH = 48
DOCUMENTS = {
    "one": None,
    "alike": ((0, 13, 30, LENGTH),) * 2,
    "unlike": ((0, LENGTH), (0, 1, 6, 12, 25, 47, LENGTH)),
}
# Numbers of query heads and key heads: 3 groups are divisible neither by 2 nor by 4 ranks.
HEADS = ((4, 4), (4, 2), (4, 1), (12, 3))
PLAIN = AttentionSettings(8**-0.5)
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


class _Operations(TorchDispatchMode):
    """Names of the operations that run within this context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def axis(rank: int, size: int, communication: CommunicationType) -> ContextParallel:
    mesh = ParallelMesh(tp=1, pp=1, dp=1, cp=size, rank=rank)
    return ContextParallel.build(mesh, build_process_groups(mesh, timedelta(seconds=60)), communication)


def core_of(
    cp: ContextParallel,
    backend: str,
    dtype: torch.dtype,
    dropout: float = 0.0,
    settings: AttentionSettings = PLAIN,
    value_width: int = 8,
) -> AttentionCore:
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "attention_backend": backend}
    shape |= {"multi_latent_attention": True, "qk_head_dim": 8, "v_head_dim": value_width}
    shape |= {"attn_logit_softcapping": settings.softcap}
    chosen = choose_backend(ModelConfig.model_validate(shape), dtype, CPU)
    return AttentionCore(3, dropout, ParallelAxes(cp=cp), settings, chosen)


def deviation(
    cp: ContextParallel,
    core: AttentionCore,
    heads: tuple[int, int],
    documents: str,
    dtype: torch.dtype,
    value_width: int = 8,
    has_sinks: bool = False,
) -> float:
    """Deviation of this rank's part of output and gradients from dense attention; all of the sinks' gradient."""
    bounds = DOCUMENTS[documents]
    whole, whole_grad = dense.heads(2, *heads, LENGTH, 8, dtype, value_width=value_width)
    randomness = StepRandomness(1, 2).micro_batch(3) if core.dropout else None
    kept = None
    if randomness is not None:
        kept = dense.kept_weights(2, heads[0], LENGTH, LENGTH, core.dropout, randomness)
    sinks = [torch.linspace(-1.0, 2.0, heads[0], dtype=dtype).requires_grad_()] if has_sinks else []
    wanted = dense.attention(
        *whole, bounds, kept, core.dropout, **vars(core.settings), sinks=sinks[0] if sinks else None
    )
    expected = dense.gradients(wanted, [*whole, *sinks], whole_grad)
    inputs = [cp.shard(part.detach(), 2).requires_grad_() for part in whole]
    forward_pass = ForwardPass(documents=None if bounds is None else Documents(bounds), randomness=randomness)
    output = attend(*inputs, forward_pass, core, sinks=sinks[0] if sinks else None)
    found = dense.gradients(output, [*inputs, *sinks], cp.shard(whole_grad, 2))
    for from_sinks in found[4:]:
        dist.all_reduce(from_sinks, group=cp.group)
    return dense.worst(found, [*(cp.shard(part, 2) for part in expected[:4]), *expected[4:]])


def worst_of_all(
    rank: int, size: int, communication: CommunicationType, dropout: float = 0.0
) -> dict[tuple[object, ...], float]:
    cp = axis(rank, size, communication)
    cases = [("auto", dtype, (4, 2), "unlike") for dtype in (torch.float32, torch.bfloat16)]
    cases += list(itertools.product(("unfused", "auto"), (torch.float64,), HEADS, DOCUMENTS))
    found: dict[tuple[object, ...], float] = {}
    for backend, dtype, heads, documents in cases:
        core = core_of(cp, backend, dtype, dropout)
        found[backend, dtype, heads, documents] = deviation(cp, core, heads, documents, dtype)
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("communication", "dropout"), [("p2p", 0.0), ("a2a", 0.0), ("p2p", 0.3), ("a2a", 0.3)])
def test_divided_sequences_equal_whole_sequences(ranks, size, communication, dropout) -> None:
    for found in ranks.run(worst_of_all, communication, dropout, world_size=size):
        wrong = {case: value for case, value in found.items() if not value <= LIMITS[case[1]]}
        assert not wrong


def worst_of_settings(rank: int, size: int, communication: CommunicationType) -> dict[tuple[object, ...], float]:
    cp = axis(rank, size, communication)
    found: dict[tuple[object, ...], float] = {}
    # A window within a sequence chunk, and one over several chunks.
    options = itertools.product((None, 4, 17), (None, 1.5), (8, 5), (0.0, 0.3), DOCUMENTS)
    for number, (window, softcap, value_width, dropout, documents) in enumerate(options):
        settings = AttentionSettings(0.3, softcap, window=window)
        backend = ("auto", "unfused")[number % 2]
        core = core_of(cp, backend, torch.float64, dropout, settings, value_width)
        case = window, softcap, value_width, dropout, documents
        found[case] = deviation(cp, core, (4, 2), documents, torch.float64, value_width, has_sinks=number % 5 > 0)
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("communication", ["p2p", "a2a"])
def test_divided_sequences_have_all_settings(ranks, size, communication) -> None:
    for found in ranks.run(worst_of_settings, communication, world_size=size):
        assert len(found) == 72
        assert not {case: value for case, value in found.items() if not value <= LIMITS[torch.float64]}


def scores(tile: Tile) -> int:
    """Number of scores per sample and head."""
    queries, keys = (stop - start for start, stop in (tile.query, tile.key))
    return queries * (queries + 1) // 2 if tile.band == CAUSAL else queries * keys


def counted(rank: int, size: int, communication: CommunicationType) -> list[tuple[str, int]]:
    """Every message of one forward and backward: kind and number of elements."""
    seen = []
    cp = axis(rank, size, communication)
    batch, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def batched(operations):
        seen.extend((operation.op.__name__, operation.tensor.numel()) for operation in operations)
        return batch(operations)

    def exchanged(output, sent, **options):
        seen.append(("all_to_all", sent.numel()))
        return all_to_all(output, sent, **options)

    ring.dist.batch_isend_irecv, ulysses.dist.all_to_all_single = batched, exchanged
    try:
        deviation(cp, core_of(cp, "auto", torch.float32), (4, 2), "unlike", torch.float32)
    finally:
        ring.dist.batch_isend_irecv, ulysses.dist.all_to_all_single = batch, all_to_all
    return seen


@pytest.mark.parametrize("size", [2, 4])
def test_messages_are_those_of_the_ring(ranks, size) -> None:
    key_and_value = 2 * 2 * 2 * LENGTH // size * 8  # [2, B, G, S/c, D]: groups are never repeated for a message
    for seen in ranks.run(counted, "p2p", world_size=size):
        # Keys are sent c-1 times in forward and in backward, their gradients c times, back to their rank.
        for kind in ("isend", "irecv"):
            assert [numel for name, numel in seen if name == kind] == [key_and_value] * (3 * size - 2)


@pytest.mark.parametrize("size", [2, 4])
def test_ulysses_takes_four_collectives(ranks, size) -> None:
    packed = 2 * LENGTH // size * (4 + 2 * max(2, size)) * 8  # [B, S/c, A + 2 G, D], groups once for each rank
    output = 2 * LENGTH // size * 4 * 8
    for seen in ranks.run(counted, "a2a", world_size=size):
        assert seen == [("all_to_all", numel) for numel in (packed, output, output, packed)]


@pytest.mark.parametrize("cp_comm_type", ["p2p", "a2a"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_ranks_part_is_the_tensor_at_its_positions(cp_comm_type: CommunicationType, dim: int) -> None:
    whole = torch.arange(3.0 * LENGTH).view((3, LENGTH) if dim else (LENGTH, 3)).requires_grad_()
    for rank in range(3):
        cp = ContextParallel(3, rank, None, cp_comm_type)
        part = cp.shard(whole, dim)
        expected = whole.index_select(dim, cp.positions(LENGTH))
        assert torch.equal(part, expected)
        weights = torch.rand_like(part)
        (got,) = torch.autograd.grad((part * weights).sum(), whole)
        (expected_grad,) = torch.autograd.grad((expected * weights).sum(), whole)
        assert torch.equal(got, expected_grad)
        with pytest.raises(ValueError, match="cannot be divided into"):
            cp.shard(whole.narrow(dim, 0, LENGTH - 1), dim)


@pytest.mark.parametrize("cp_comm_type", ["p2p", "a2a"])
def test_a_ranks_part_is_cut_without_indices_from_the_host(cp_comm_type: CommunicationType) -> None:
    # Copying an index to a GPU would synchronise with its queue.
    whole = torch.empty(LENGTH, 2)
    with _Operations() as seen:
        ContextParallel(2, 1, None, cp_comm_type).shard(whole, 0)
    assert not {name for name in seen.names if "index" in name or "_to_copy" in name or "arange" in name}, seen.names


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_rank_of_the_ring_has_the_same_load(size) -> None:
    loads = {
        (rank, source): sum(scores(tile) for tile in ring_tiles(rank, source, size, 12, None))
        for rank in range(size)
        for source in range(size)
    }
    own, others = 12 * 13 // 2, 12 * 6
    assert all(load == (own if rank == source else others) for (rank, source), load in loads.items())
    whole = 12 * size
    assert sum(loads.values()) == whole * (whole + 1) // 2


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 17, 40])
def test_tiles_are_the_mask_and_nothing_twice(size, documents, window) -> None:
    bounds = DOCUMENTS[documents]
    length = LENGTH // size
    painted = torch.zeros(2, LENGTH, LENGTH, dtype=torch.int64)
    places = [torch.cat([torch.arange(s, s + n) for s, n in ring_chunks(r, size, length // 2)]) for r in range(size)]
    for rank, source in itertools.product(range(size), repeat=2):
        local = torch.zeros(2, length, length, dtype=torch.int64)
        if size > 1:
            tiles = ring_tiles(rank, source, size, length, bounds, window)
        else:
            tiles = whole_tiles(length, bounds, window=window)
        for tile in tiles:
            block = torch.ones(tile.query[1] - tile.query[0], tile.key[1] - tile.key[0], dtype=torch.int64)
            block[outside(tile.band, *block.shape, CPU)] = 0
            assert block.any(0).all() and block.any(1).all(), "no row and no column without a score"
            if window is None:
                assert block.sum() == scores(tile)
            samples, _, queries = tile.queries
            local[samples, queries, tile.keys[2]] += block
        painted[:, places[rank][:, None], places[source]] += local
    assert torch.equal(painted, dense.mask(LENGTH, bounds, 2, window=window)[:, 0].long())


def test_documents_have_no_scores_between_them() -> None:
    tiles = whole_tiles(1000, [tuple(range(0, 1001, 100))] * 3)
    assert tiles[0] == Tile(None, (0, 100), (0, 100), CAUSAL)
    assert sum(scores(tile) for tile in tiles) == 10 * 5050


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda cp: ring.ring_attention(
                *[torch.ones(1, 4, 3, 8)] * 3, None, cp, TileAttention(Unfused(), AttentionSettings(1.0))
            ),
            "3 positions per rank",
        ),
        (lambda cp: ulysses.divide_heads(*[torch.ones(1, 3, 4, 8)] * 3, cp), "3 attention heads .* over 2"),
    ],
)
def test_indivisible_sizes_are_refused(call, says) -> None:
    with pytest.raises(ValueError, match=says):
        call(ContextParallel(size=2))


def tiles_of_two_layers(rank: int, size: int) -> int:
    cp = axis(rank, size, "p2p")
    core, parameter_shards = core_of(cp, "auto", torch.float64), []
    forward_pass = ForwardPass(documents=Documents(DOCUMENTS["unlike"]))
    plain = ring.ring_tiles
    ring.ring_tiles = lambda *arguments: parameter_shards.append(arguments) or plain(*arguments)
    try:
        for _ in range(2):
            attend(*(cp.shard(part.detach(), 2) for part in dense.heads(2, 4, 2, LENGTH, 8)[0]), forward_pass, core)
    finally:
        ring.ring_tiles = plain
    return len(parameter_shards)


def test_tiles_of_the_ring_are_computed_once_for_all_layers(ranks) -> None:
    assert ranks.run(tiles_of_two_layers, world_size=2) == [2, 2]


def message_devices(rank: int, size: int) -> list[str]:
    cp = axis(rank, size, "p2p")
    return [message_device(cp.group, torch.device(name)).type for name in ("cpu", "cuda")]


def test_messages_of_gloo_go_through_host_memory(ranks) -> None:
    assert ranks.run(message_devices, world_size=2) == [["cpu", "cpu"]] * 2


def shifted_elsewhere(rank: int, size: int) -> tuple[list[str], str, bool]:
    """Shift tensors from a device without send support: returns the messages and the result."""
    cp = axis(rank, size, "p2p")
    seen, batch = [], dist.batch_isend_irecv
    ring.dist.batch_isend_irecv = lambda operations: (
        seen.extend(operation.tensor.dtype for operation in operations) or batch(operations)
    )
    # Another dtype stands in for another device: `to` moves a tensor there and back.
    ring.message_device = lambda _group, _device: torch.float64
    try:
        shift = ring.start_shift(torch.full((3,), rank, dtype=torch.float32), cp, 0)
    finally:
        ring.dist.batch_isend_irecv, ring.message_device = batch, message_device
    came = shift.result()
    return [str(dtype) for dtype in seen], came.device.type, bool((came == (rank - 1) % size).all())


def test_a_shift_is_sent_from_memory_that_the_backend_supports(ranks) -> None:
    assert ranks.run(shifted_elsewhere, world_size=2) == [(["torch.float64"] * 2, "cpu", True)] * 2


def deviation_on_a_gpu(rank: int, size: int) -> float:
    cp = axis(rank, size, "p2p")
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "attention_backend": "fused"}
    backend = choose_backend(ModelConfig.model_validate(shape), torch.float32, torch.device("cuda"))
    core = AttentionCore(3, 0.0, ParallelAxes(cp=cp), AttentionSettings(8**-0.5), backend)
    bounds = DOCUMENTS["unlike"]
    whole, whole_grad = dense.heads(2, 4, 2, LENGTH, 8, torch.float32)
    expected = dense.gradients(dense.attention(*whole, bounds), whole, whole_grad)
    inputs = [cp.shard(part.detach(), 2).cuda().requires_grad_() for part in whole]
    output = attend(*inputs, ForwardPass(documents=Documents(bounds)), core)
    found = dense.gradients(output, inputs, cp.shard(whole_grad, 2).cuda())
    return dense.worst([part.cpu() for part in found], [cp.shard(part, 2) for part in expected])


@pytest.mark.gpu
def test_the_ring_on_gpus_over_gloo(ranks) -> None:
    assert max(ranks.run(deviation_on_a_gpu, world_size=2)) <= 1e-5
