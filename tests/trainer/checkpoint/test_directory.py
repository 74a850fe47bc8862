"""Folders of checkpoints: which one is resumed from, and which are deleted."""

import json

import pytest

from trainer.checkpoint.directory import (
    LATEST,
    CheckpointError,
    checkpoint_path,
    complete_iterations,
    damage,
    find_latest,
    prune,
    publish,
    remove_leftovers,
)


def fake(root, iteration, size=3):
    folder = checkpoint_path(root, iteration)
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"x" * size)
    (folder / "metadata.json").write_text(json.dumps({"files": {"a": 3}}))
    return folder


def test_latest_is_the_named_or_else_the_newest_undamaged_checkpoint(tmp_path):
    assert find_latest(tmp_path) == (None, None)
    for iteration in (10, 20, 30):
        fake(tmp_path, iteration)
    (tmp_path / LATEST).write_text("20\n")
    assert find_latest(tmp_path) == (checkpoint_path(tmp_path, 20), None)
    (checkpoint_path(tmp_path, 20) / "a").write_bytes(b"x")
    path, note = find_latest(tmp_path)
    assert path == checkpoint_path(tmp_path, 10)
    assert "iter_0000020" in note
    assert "resuming from iter_0000010, the newest undamaged checkpoint before it" in note
    (tmp_path / LATEST).write_text("no number")
    assert find_latest(tmp_path)[0] == checkpoint_path(tmp_path, 30)
    (tmp_path / LATEST).unlink()
    path, note = find_latest(tmp_path)
    assert path == checkpoint_path(tmp_path, 30)
    assert "names no iteration; resuming from iter_0000030, the newest undamaged checkpoint" in note
    (checkpoint_path(tmp_path, 30) / "metadata.json").write_text("{")
    assert find_latest(tmp_path)[0] == checkpoint_path(tmp_path, 10)
    (checkpoint_path(tmp_path, 10) / "a").unlink()
    with pytest.raises(CheckpointError, match="no undamaged checkpoint"):
        find_latest(tmp_path)


def test_a_rollback_never_jumps_forward_to_the_branch_that_was_left(tmp_path):
    for iteration in (10, 20, 30, 40):
        fake(tmp_path, iteration)
    (tmp_path / LATEST).write_text("20\n")
    for iteration in (10, 20):
        (checkpoint_path(tmp_path, iteration) / "a").unlink()
    with pytest.raises(CheckpointError, match=r"no undamaged checkpoint before it; .* \(iter_0000030, iter_0000040\)"):
        find_latest(tmp_path)
    rejected = {checkpoint_path(tmp_path, 30)}
    with pytest.raises(CheckpointError, match=r"a later one into .* \(iter_0000040\)"):
        find_latest(tmp_path, rejected)


def test_publish_replaces_a_checkpoint_of_the_same_iteration(tmp_path):
    fake(tmp_path, 5, size=1)
    fake(tmp_path / "aside", 5).rename(tmp_path / ".iter_0000005.tmp-2")
    publish(tmp_path / ".iter_0000005.tmp-2", tmp_path, 5, 2)
    assert damage(checkpoint_path(tmp_path, 5)) is None
    assert (tmp_path / LATEST).read_text() == "5\n"
    assert complete_iterations(tmp_path) == [5]


def test_pruning_keeps_later_iterations(tmp_path):
    for iteration in (1, 2, 3, 4, 9):
        fake(tmp_path, iteration)
    prune(tmp_path, 2, 4, 1)
    assert complete_iterations(tmp_path) == [3, 4, 9]


def test_pruning_does_not_count_damaged_checkpoints(tmp_path):
    for iteration in (1, 2, 3, 4, 5, 6):
        fake(tmp_path, iteration)
    (checkpoint_path(tmp_path, 4) / "a").write_bytes(b"x")
    (checkpoint_path(tmp_path, 5) / "metadata.json").write_text("{")
    prune(tmp_path, 2, 6, 1)
    assert complete_iterations(tmp_path) == [3, 4, 5, 6]
    for iteration in (3, 6):
        (checkpoint_path(tmp_path, iteration) / "a").unlink()
    prune(tmp_path, 1, 6, 1)
    assert complete_iterations(tmp_path) == [3, 4, 5, 6]


def test_only_leftovers_are_removed(tmp_path):
    for name in (".iter_0000002.tmp-1", ".iter_0000001.old-3", "iter_0000001", "notes", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / ".latest-1").write_text("2")
    assert remove_leftovers(tmp_path) == [".iter_0000001.old-3", ".iter_0000002.tmp-1", ".latest-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "iter_0000001", "notes"]
