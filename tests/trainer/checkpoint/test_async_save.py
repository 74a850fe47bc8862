"""Saves that are drained in a thread: the same bytes as a synchronous save, whatever the training does meanwhile."""

import resource
import signal
import threading

import pytest
import torch

from tests.trainer.checkpoint.test_training import VOCAB_SIZE, build, iterate
from tests.trainer.parity.parity_case import Case
from tests.waiting import HANG_S, wait_for
from trainer.checkpoint.directory import LATEST, checkpoint_path, complete_iterations
from trainer.checkpoint.save import CheckpointWriter
from trainer.checkpoint.saving.draining import Draining
from trainer.checkpoint.saving.host_copy import HostCopy, copied_bytes
from trainer.checkpoint.saving.memory_check import check_copies_fit
from trainer.checkpoint.saving.snapshot import Snapshot
from trainer.config.errors import ConfigError
from trainer.optimizer.split_master import joined
from trainer.process.progress import TrainingProgress

CPU = torch.device("cpu")


def writer_of(config, root, rank):
    writer = CheckpointWriter(root, config, VOCAB_SIZE, 1, CPU).beside_training()
    writer.prepare(rank)
    return writer


def save_twice_in_both_ways(rank, world_size, case, root):
    """Save iterations 1 and 2, at once and beside the next iterations; the second reuses the memory of the first."""
    config, model, optimizer = build(rank, world_size, case)
    at_once = CheckpointWriter(root / "sync", config, VOCAB_SIZE, 1, CPU)
    at_once.prepare(rank)
    beside, memory, draining = writer_of(config, root / "async", rank), HostCopy(CPU), Draining()
    progress = TrainingProgress(seed=7)
    for iteration in (1, 2):
        iterate(case, model, optimizer, iteration)
        progress.iteration = iteration
        progress.add_further_loss("mtp_1_loss", 1.0, 2.0)
        at_once.save(model, optimizer, progress)
        staged = beside.stage(model, optimizer, progress, memory)
        # The drain begins after the state has changed.
        iterate(case, model, optimizer, iteration + 10)
        progress.iteration += 10
        progress.add_further_loss("mtp_1_loss", 1.0, 2.0)
        draining.begin(lambda staged=staged: beside.drain(staged))
        iterate(case, model, optimizer, iteration + 20)
        assert draining.take().missed is None
        progress.further_losses = {}
    return copied_bytes(staged)


LAYOUTS = {
    "dp2 bf16": Case(dp=2, micro_batches=2, precision="bf16"),
    "zero1 bf16": Case(dp=2, micro_batches=2, precision="bf16", zero=1),
    "zero1 remainders": Case(dp=2, micro_batches=2, precision="bf16", zero=1, remainders=True),
    "zero3 fp16": Case(dp=2, micro_batches=2, precision="fp16", zero=3),
    "tp2 pp2": Case("qwen", tp=2, pp=2, micro_batches=2),
    "experts": Case("mixtral", dp=2, ep=2, micro_batches=2, zero=1),
}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_save_beside_the_training_has_the_bytes_of_one_between_two_steps(ranks, tmp_path, name):
    case = LAYOUTS[name]
    copied = ranks.run(save_twice_in_both_ways, case, tmp_path, world_size=case.world_size)
    saved = {iteration: contents(checkpoint_path(tmp_path / "async", iteration)) for iteration in (1, 2)}
    for iteration in (1, 2):
        assert saved[iteration] == contents(checkpoint_path(tmp_path / "sync", iteration))
    files = {name: content for name, content in saved[1].items() if name.endswith(".safetensors")}
    # No copy of unchanged, and so stale, weights.
    assert all(saved[2][name] != content for name, content in files.items())
    # The memory that is told beforehand: the tensors, and less than a cache line for each.
    size = sum(map(len, files.values()))
    assert 0.5 * size < sum(copied) < 1.1 * size


class HeldSnapshot(Snapshot):
    """Copies that are not made before ``gate`` is set."""

    def __init__(self, pairs):
        super().__init__(pairs, None)
        self.gate, self.began = threading.Event(), threading.Event()

    def _copy_all(self):
        self.began.set()
        assert self.gate.wait(HANG_S)
        super()._copy_all()


def test_a_change_waits_for_copies_that_a_thread_makes():
    state, place, events = torch.ones(4), torch.zeros(4), []
    snapshot = HeldSnapshot([(state, place)])
    copier = threading.Thread(target=snapshot.make)
    copier.start()
    assert snapshot.began.wait(HANG_S)

    def change():
        events.append("asks")
        snapshot.before_change()
        events.append("changes")
        state.zero_()

    training = threading.Thread(target=change)
    training.start()
    wait_for(lambda: events == ["asks"], "the training")
    assert training.is_alive() and snapshot.waited_s == 0.0
    snapshot.gate.set()
    for thread in (copier, training):
        thread.join(HANG_S)
    assert events == ["asks", "changes"]
    assert (place.tolist(), state.tolist()) == ([1.0] * 4, [0.0] * 4)
    assert snapshot.waited_s > 0.0


def change_after_a_stage(rank, world_size, case, root):
    """Stage, load or skip a step, and drain; of the copied masters: how many, and how many are not as staged."""
    config, model, optimizer = build(rank, world_size, case)
    writer, memory = writer_of(config, root, rank), HostCopy(CPU)
    count, different = 0, 0
    changes = (lambda: optimizer.restore(3, None), optimizer.adopt_weights, optimizer.hold_back)
    for iteration, change in enumerate(changes, 1):
        for master in optimizer.masters.values():
            master.copy_(torch.full(master.shape, float(iteration)))
        before = {name: joined(master).clone() for name, master in optimizer.masters.items()}
        staged = writer.stage(model, optimizer, TrainingProgress(iteration=iteration), memory)
        change()
        for master in optimizer.masters.values():
            master.copy_(torch.zeros(master.shape))
        assert writer.drain(staged).missed is None
        copies = masters_of(staged)
        count += len(copies)
        # Padding of the vocabulary is not saved.
        different += sum(not torch.equal(copy.view(-1), before[name][: copy.numel()]) for name, copy in copies.items())
    return count, different


def masters_of(staged):
    """The copies of masters, by the name of their parameter."""
    named = {key: copy for file, copies in staged.files.items() for key, copy in copies.items()}
    return {key.removeprefix("master."): copy for key, copy in named.items() if key.startswith("master.")}


def test_a_load_and_a_skipped_step_wait_for_copies(ranks, tmp_path):
    (first, *differences), (second, *others) = ranks.run(
        change_after_a_stage, LAYOUTS["zero1 bf16"], tmp_path, world_size=2
    )
    assert first > 0 < second and differences == others == [0]


def save_without_a_step(rank, world_size, case, root):
    """Drain while the main threads take no step and meet in no collective; returns the content of the pointer."""
    config, model, optimizer = build(rank, world_size, case)
    writer, draining = writer_of(config, root, rank), Draining()
    staged = writer.stage(model, optimizer, TrainingProgress(iteration=1), HostCopy(CPU))
    draining.begin(lambda: writer.drain(staged))
    draining.wait()
    mark = (root / LATEST).read_text()
    assert draining.is_pending and draining.has_ended
    assert draining.take().missed is None
    return mark


def test_the_mark_is_set_at_once_not_an_interval_late(ranks, tmp_path):
    assert ranks.run(save_without_a_step, LAYOUTS["dp2 bf16"], tmp_path, world_size=2) == ["1\n", "1\n"]


def refuse_one_drain(rank, world_size, case, root):
    """Drain while rank 1 may write a few bytes only, then again; returns what was missed, and what is complete."""
    config, model, optimizer = build(rank, world_size, case)
    writer, draining, memory = writer_of(config, root, rank), Draining(), HostCopy(CPU)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        staged = writer.stage(model, optimizer, TrainingProgress(iteration=1), memory)
        draining.begin(lambda: writer.drain(staged))
        iterate(case, model, optimizer, 1)
        missed = draining.take()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    again = writer.stage(model, optimizer, TrainingProgress(iteration=2), memory)
    draining.begin(lambda: writer.drain(again))
    assert draining.take().missed is None
    return missed.missed.sentence, missed.missed.is_here, missed.written_bytes


def test_a_disk_that_refuses_a_drain_misses_one_save(ranks, tmp_path):
    case = Case("qwen", tp=2, micro_batches=2)
    first, second = ranks.run(refuse_one_drain, case, tmp_path, world_size=2)
    sentence = f"the checkpoint of iteration 1 could not be written to {tmp_path}: File too large"
    assert (first, second) == ((sentence, False, 0), (sentence, True, 0))
    assert complete_iterations(tmp_path) == [2]


def compare_with_free_memory(rank, _world_size, free):
    """Two ranks on each of two nodes; the answer or the error of each rank."""
    try:
        return check_copies_fit(100 + rank, free, CPU, node=rank // 2)
    except ConfigError as error:
        return str(error)


def test_copies_that_a_node_cannot_hold_are_refused_on_all_ranks(ranks):
    first, *others = ranks.run(compare_with_free_memory, 204)
    assert first.startswith("checkpoint.async_save: the copies of a save take 0.00 GiB of host memory on ")
    assert "for 2 ranks, but 0.00 GiB are available; set checkpoint.async_save to false" in first
    assert others == [first] * 3
    assert ranks.run(compare_with_free_memory, 205) == [(103, 201), (103, 201), (103, 205), (103, 205)]


def test_an_error_of_the_thread_is_raised_where_its_outcome_is_taken():
    draining = Draining()
    draining.begin(lambda: 1 // 0)
    draining.wait()
    with pytest.raises(ZeroDivisionError):
        draining.take()
    assert not draining.is_pending
    draining.begin(lambda: 5)
    assert draining.take() == 5
