"""Faults during save and load of a checkpoint.

On one rank only, between two steps, or behind a cache.
"""

import contextlib
import io
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from tests.trainer.checkpoint.test_checkpoint import CPU, VOCAB_SIZE, build, config_of
from tests.trainer.checkpoint.test_directory import fake
from trainer.checkpoint import resume
from trainer.checkpoint.directory import (
    LATEST,
    CheckpointError,
    checkpoint_path,
    complete_iterations,
    damage,
    find_latest,
    publish,
    remove_leftovers,
    temporary_path,
)
from trainer.checkpoint.rank_indexes import gather_indexes
from trainer.checkpoint.resume import restore
from trainer.checkpoint.save import CheckpointWriter
from trainer.process.failure import PeerFailedError
from trainer.process.progress import TrainingProgress

RANKS = 2


def save(rank, world_size, root, config, breaks=None):
    """Save, and return the error. ``breaks`` is called with a MonkeyPatch before."""
    model, optimizer = build(config, rank, world_size)
    writer = CheckpointWriter(root, config, VOCAB_SIZE, 1, CPU)
    writer.prepare(rank)
    with pytest.MonkeyPatch.context() as patch:
        if breaks is not None:
            breaks(patch, rank)
        try:
            writer.save(model, optimizer, TrainingProgress(iteration=1))
        except Exception as error:
            return type(error).__name__, str(error)
    return None


def full_disk(rank, world_size, root, config):
    """Save once, then again with a file size limit on rank 1.

    The limit is a few bytes.
    """
    model, optimizer = build(config, rank, world_size)
    writer = CheckpointWriter(root, config, VOCAB_SIZE, 1, CPU)
    writer.prepare(rank)
    writer.save(model, optimizer, TrainingProgress(iteration=1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        missed = writer.save(model, optimizer, TrainingProgress(iteration=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    left = sorted(os.listdir(root))  # noqa: PTH208
    # The next save finds room again.
    again = writer.save(model, optimizer, TrainingProgress(iteration=3))
    return missed.sentence, type(missed.error()), str(missed.error()), left, again


def test_failing_write_is_one_sentence_and_keeps_the_older_checkpoint(ranks, tmp_path):
    sentence = (
        f"the checkpoint of iteration 2 could not be written to {tmp_path}: File too large; the last complete one is "
        "iter_0000001"
    )
    peer = "the checkpoint of iteration 2 could not be written: another rank reports the cause"
    first, second = ranks.run(full_disk, tmp_path, config_of(tp=2), world_size=2)
    assert first == (sentence, PeerFailedError, peer, ["iter_0000001", LATEST], None)
    assert (*second[:3], second[4]) == (sentence, CheckpointError, sentence, None)
    assert damage(checkpoint_path(tmp_path, 1)) is None
    assert find_latest(tmp_path) == (checkpoint_path(tmp_path, 3), None)


def refuse_to_write(patch, rank):
    def fail(*_):
        raise RuntimeError("no memory for a copy")

    if rank == 1:
        patch.setattr(CheckpointWriter, "_write_part", fail)


def test_a_failed_save_on_one_rank_fails_on_all(ranks, tmp_path):
    first, second = ranks.run(save, tmp_path, config_of(tp=2), refuse_to_write)
    assert first == (
        "PeerFailedError",
        "the checkpoint of iteration 1 could not be written: another rank reports the cause",
    )
    assert second == ("RuntimeError", "no memory for a copy")
    assert list(tmp_path.iterdir()) == []


def refuse_to_delete(patch, _rank):
    def fail(*_):
        raise PermissionError(13, "Permission denied")

    patch.setattr("trainer.checkpoint.save.prune", fail)


def told_to_keep_one(rank, world_size, root):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        return save(
            rank, world_size, root, config_of(tp=2, checkpoint={"keep_last": 1}), refuse_to_delete
        ), out.getvalue()


def test_a_failed_deletion_is_logged_and_the_save_succeeds(ranks, tmp_path):
    note = f"old checkpoints in {tmp_path} could not be deleted: Permission denied\n"
    assert ranks.run(told_to_keep_one, tmp_path) == [(None, note), (None, "")]
    assert damage(checkpoint_path(tmp_path, 1)) is None


def write_indexes(folder, *of_ranks):
    for rank, (shape, dtype, *flat_ranges) in enumerate(of_ranks):
        parts = [["f", "w", [0, 0], [4, 6], *flat_range] for flat_range in flat_ranges]
        values = {
            "tensors": {"model": {"w": {"shape": shape, "dtype": dtype, "parts": parts}}},
            "files": {"f": [0, []]},
        }
        (folder / f"index_{rank:05d}.json").write_text(json.dumps(values))
    return range(len(of_ranks))


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (([4, 6], "F32", (10, 22)), "the ranks' parts of w do not cover the tensor exactly once"),
        (([4, 6], "F32", (14, 24)), "the ranks' parts of w do not cover the tensor exactly once"),
        (([4, 6], "BF16", (12, 24)), r"w is F32 \[4, 6\] on one rank, BF16 \[4, 6\] on another"),
        (([4, 7], "F32", (12, 24)), r"w is F32 \[4, 6\] on one rank, F32 \[4, 7\] on another"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path, second, says):
    """In the first case the gap is as large as the overlap."""
    writers = write_indexes(tmp_path, ([4, 6], "F32", (0, 12)), second)
    with pytest.raises(CheckpointError, match=says):
        gather_indexes(tmp_path, writers)
    writers = write_indexes(tmp_path, ([4, 6], "F32", (0, 12)), ([4, 6], "F32", (12, 24)))
    assert gather_indexes(tmp_path, writers)[0]["model"]["w"].is_complete


def hide_lists(patch, _rank):
    """Simulate a node's cache that lacks the files of other nodes."""
    patch.setattr(Path, "glob", lambda *_: iter(()))


@pytest.mark.parametrize("tp", [1, 2])
def test_parts_are_found_without_listing_the_folder(ranks, tmp_path, tp):
    """With tp 1 the second rank has only copies, and writes nothing."""
    assert ranks.run(save, tmp_path, config_of(tp=tp), hide_lists) == [None, None]
    assert damage(checkpoint_path(tmp_path, 1)) is None
    files = {path.name for path in checkpoint_path(tmp_path, 1).iterdir()}
    expected = {f"{kind}_rank{rank:05d}.safetensors" for kind in ("model", "optimizer") for rank in range(tp)}
    assert files == {"metadata.json", *expected}


def load(rank, world_size, root, config, others=None, breaks=None):
    """Restore, on the second rank with the config ``others``, and return the error."""
    if others is not None and rank == 1:
        config = others
    model, optimizer = build(config, rank, world_size)
    with pytest.MonkeyPatch.context() as patch:
        if breaks is not None:
            breaks(patch, rank)
        try:
            restore(config, root, model, optimizer, TrainingProgress(), CPU)
        except Exception as error:
            return type(error).__name__, str(error)
    return None


def refuse_to_read(patch, rank):
    def fail(*_):
        raise RuntimeError("no memory for a map")

    if rank == 1:
        patch.setattr(resume, "read_training_state", fail)


def refuse_to_choose(patch, _rank):
    def fail(*_):
        raise RuntimeError("a folder like no other")

    patch.setattr(resume, "find_latest", fail)


def test_a_failed_read_on_one_rank_fails_on_all(ranks, tmp_path):
    config = config_of(tp=2)
    assert ranks.run(save, tmp_path, config) == [None, None]
    peer = ("PeerFailedError", f"{checkpoint_path(tmp_path, 1)} cannot be read: another rank reports the cause")
    assert ranks.run(load, tmp_path, config, None, refuse_to_read) == [peer, ("RuntimeError", "no memory for a map")]
    first, second = ranks.run(load, tmp_path, config, config_of(tp=2, model={"norm_epsilon": 1e-6}))
    assert first == peer
    assert second[0] == "AnotherModelError"
    assert "norm_epsilon" in second[1]
    first, second = ranks.run(load, tmp_path, config, None, refuse_to_choose)
    assert first == ("RuntimeError", "a folder like no other")
    assert second == ("PeerFailedError", "rank 0 found no readable checkpoint and reports the cause")
    assert ranks.run(load, tmp_path, config) == [None, None]


class Killed(BaseException):
    """Stands for a kill: no code of the process runs after it."""


@pytest.fixture
def replaced(tmp_path, monkeypatch):
    """A function that replaces checkpoint 5 and raises an error between the two renames."""

    def replace(error):
        old = fake(tmp_path, 5)
        (old / "which").write_text("the old one")
        (tmp_path / LATEST).write_text("5\n")
        fake(tmp_path / "aside", 5).rename(temporary_path(tmp_path, 5, 2))
        rename = Path.rename

        def failing(path, target):
            if path == temporary_path(tmp_path, 5, 2):
                raise error
            return rename(path, target)

        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(Path, "rename", failing)
            publish(temporary_path(tmp_path, 5, 2), tmp_path, 5, 2)
        (tmp_path / "aside").rmdir()

    return replace


def assert_old_one_is_back(root):
    assert (checkpoint_path(root, 5) / "which").read_text() == "the old one"
    assert damage(checkpoint_path(root, 5)) is None


def test_a_kill_between_two_renames_loses_no_checkpoint(tmp_path, replaced):
    replaced(Killed())
    assert complete_iterations(tmp_path) == []
    assert remove_leftovers(tmp_path) == [".iter_0000005.tmp-2"]
    assert_old_one_is_back(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000005", LATEST]


def test_a_refused_rename_loses_no_checkpoint(tmp_path, replaced):
    replaced(OSError("no"))
    assert_old_one_is_back(tmp_path)


def test_deleted_and_replaced_checkpoints_are_not_restored(tmp_path):
    for iteration, attempt in ((5, 1), (5, 2), (6, 1), (7, 10), (7, 9)):
        folder = fake(tmp_path / "elsewhere", iteration)
        (folder / "attempt").write_text(str(attempt))
        folder.rename(tmp_path / f".iter_{iteration:07d}.old-{attempt}")
    fake(tmp_path, 6)
    for attempt in (1, 2):
        (tmp_path / f".iter_0000005.old-{attempt}" / "a").unlink()
    remove_leftovers(tmp_path)
    assert complete_iterations(tmp_path) == [6, 7]
    assert not (checkpoint_path(tmp_path, 6) / "attempt").exists()
    assert (checkpoint_path(tmp_path, 7) / "attempt").read_text() == "10"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


class Lost(Exception):
    """Raised by a check that finds another writer."""


def checks(*actions):
    """A check that does the next of ``actions`` at each call."""
    remaining = iter(actions)
    return lambda: next(remaining)()


def refuse_the_loser():
    raise Lost


def nothing():
    pass


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_writer_that_lost_the_run_publishes_nothing_more(tmp_path, number):
    """The loser stands still before one of the three checks; meanwhile the winner goes on from 5."""
    fake(tmp_path, 5)
    (tmp_path / LATEST).write_text("5\n")
    fake(tmp_path / "aside", 7).rename(temporary_path(tmp_path, 7, 1))
    check = checks(*[nothing] * number, refuse_the_loser)
    with pytest.raises(Lost):
        publish(temporary_path(tmp_path, 7, 1), tmp_path, 7, 1, check)
    # A checkpoint that was renamed before the loss is complete; the winner starts from the named one.
    assert complete_iterations(tmp_path) == ([5, 7] if number == 2 else [5])
    assert (tmp_path / LATEST).read_text() == "5\n"


@pytest.mark.parametrize("number", [1, 2])
def test_a_stall_between_check_and_rename_publishes_nothing(tmp_path, number):
    """The winner prepares the folder, and saves iteration 7 itself, just after the loser's check."""
    fake(tmp_path, 5)
    fake(tmp_path, 7)
    (tmp_path / LATEST).write_text("5\n")
    fake(tmp_path / "loser", 7).rename(temporary_path(tmp_path, 7, 1))
    winner = fake(tmp_path / "winner", 7)
    (winner / "which").write_text("the winner's")

    def take_over():
        remove_leftovers(tmp_path)
        winner.rename(temporary_path(tmp_path, 7, 2))
        publish(temporary_path(tmp_path, 7, 2), tmp_path, 7, 2)
        (tmp_path / LATEST).write_text("9\n")

    check = checks(*[nothing] * number, take_over)
    with pytest.raises(FileNotFoundError):
        publish(temporary_path(tmp_path, 7, 1), tmp_path, 7, 1, check)
    assert (checkpoint_path(tmp_path, 7) / "which").read_text() == "the winner's"
    assert (tmp_path / LATEST).read_text() == "9\n"
