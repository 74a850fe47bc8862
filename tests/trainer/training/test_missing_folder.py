"""No run with saved progress begins again because its folder of checkpoints is missing. Real ranks, real mounts."""

import ctypes
import json
import os
import shutil
import subprocess

import pytest

from tests.trainer.training.pretraining_job import Job
from tests.waiting import wait_for
from trainer.checkpoint.directory import complete_iterations
from trainer.checkpoint.mounted_folder import MountedFolder

BASE = {
    "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 100},
    "training": {"train_iters": 4, "seq_length": 16, "eval_iters": 0, "device": "cpu"},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount file systems")


def write_config(run, train_iters=4, **checkpoint):
    run.mkdir(exist_ok=True)
    values = {**BASE, "training": {**BASE["training"], "train_iters": train_iters}}
    values["checkpoint"] = {"save_interval": 2, "wait_for_folder_s": 0, **checkpoint}
    (run / "config.yaml").write_text(json.dumps(values))


def train(run, number=1, ranks=1, faults=None):
    """Exit codes of all ranks of an attempt."""
    with Job(run, ranks, faults, number=number) as job:
        return job.ends(range(ranks))


def error_of(run, number, rank=0):
    return json.loads((run / f"attempts/{number}/errors/rank-{rank:05d}.json").read_text())["message"]


def log_of(run, number):
    return (run / f"attempts/{number}/rank-00000.log").read_text()


def saved(run):
    return json.loads((run / "saved.json").read_text())


def remove(folder):
    shutil.rmtree(folder)


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def link_to_nothing(folder):
    shutil.rmtree(folder)
    folder.symlink_to(folder.with_name("gone"))


def forget_the_record(folder):
    shutil.rmtree(folder)
    (folder.parent / "run" / "saved.json").unlink()


@pytest.mark.parametrize(
    ("lose", "lack"),
    [
        (remove, "does not exist"),
        (empty, "is empty"),
        (link_to_nothing, "is a link to {}/gone, which does not exist,"),
        (forget_the_record, "does not exist"),
    ],
)
def test_a_lost_folder_ends_the_run_and_nothing_is_written_there(tmp_path, lose, lack):
    run, folder, start = tmp_path / "run", tmp_path / "own", tmp_path / "start"
    write_config(run, save=str(start), train_iters=2)
    assert train(run) == [0]
    shutil.rmtree(run)
    # The start point does not replace the run's own progress.
    write_config(run, save=str(folder), load=str(start))
    assert train(run) == [0]
    assert (saved(run)["iteration"], saved(run)["folder"]) == (4, str(folder))
    lose(folder)
    before = (run / "metrics.jsonl").read_text()
    write_config(run, save=str(folder), load=str(start), train_iters=8)
    assert train(run, 2) == [1]
    assert error_of(run, 2).startswith(f"checkpoint folder {folder} {lack.format(tmp_path)} on ")
    assert "the run has trained to iteration 4 and saved until 4 (metrics.jsonl, " in error_of(run, 2)
    assert f"llmctl submit {run}/config.yaml" in error_of(run, 2)
    assert not folder.exists() or list(folder.iterdir()) == []
    assert not (tmp_path / "gone").exists()
    assert (run / "metrics.jsonl").read_text() == before


def test_another_empty_folder_is_refused_with_the_one_that_has_the_checkpoints(tmp_path):
    run = tmp_path / "run"
    write_config(run)
    assert train(run) == [0]
    write_config(run, train_iters=8, save=str(tmp_path / "other"))
    assert train(run, 2) == [1]
    assert f"saved until 4 in {run}/checkpoints (metrics.jsonl" in error_of(run, 2)
    assert not (tmp_path / "other").exists()


def test_a_run_that_was_ended_before_its_first_save_begins_again(tmp_path):
    run = tmp_path / "run"
    write_config(run, train_iters=100_000, save_interval=100_000)
    with Job(run, 1) as job:
        job.wait_for_iteration(3)
    assert saved(run)["iteration"] is None
    shutil.rmtree(run / "checkpoints")
    write_config(run, save_interval=2)
    assert train(run, 2) == [0]
    assert complete_iterations(run / "checkpoints") == [2, 4]


def test_a_run_may_go_back_to_an_older_checkpoint(tmp_path):
    run = tmp_path / "run"
    write_config(run)
    assert train(run) == [0]
    shutil.rmtree(run / "checkpoints/iter_0000004")
    write_config(run, train_iters=6)
    assert train(run, 2) == [0]
    assert "at iteration 2" in log_of(run, 2)
    assert saved(run)["iteration"] == 6


def test_a_folder_that_comes_late_is_waited_for(tmp_path):
    run, folder = tmp_path / "run", tmp_path / "own"
    write_config(run, save=str(folder))
    assert train(run) == [0]
    folder.rename(tmp_path / "away")
    write_config(run, train_iters=6, save=str(folder), wait_for_folder_s=3600)
    with Job(run, 1, number=2) as job:
        waits = f"checkpoint folder {folder} does not exist on "
        wait_for(lambda: (run / "attempts/2/rank-00000.log").exists() and waits in log_of(run, 2), "the wait")
        assert "waiting 3600 s for it" in log_of(run, 2)
        (tmp_path / "away").rename(folder)
        assert job.ends([0]) == [0]
    assert "at iteration 4" in log_of(run, 2)
    assert complete_iterations(folder) == [2, 4, 6]


def test_a_stop_request_ends_the_wait(tmp_path):
    run, folder = tmp_path / "run", tmp_path / "own"
    write_config(run, save=str(folder))
    assert train(run) == [0]
    remove(folder)
    write_config(run, train_iters=6, save=str(folder), wait_for_folder_s=3600)
    with Job(run, 1, number=2) as job:
        wait_for(lambda: (run / "attempts/2/rank-00000.log").exists() and "waiting" in log_of(run, 2), "the wait")
        (run / "attempts/2/stop").touch()
        assert job.ends([0]) == [1]
    assert "does not exist" in error_of(run, 2)


@pytest.mark.parametrize(("is_needed", "codes"), [(True, [3]), (False, [0])])
def test_a_first_start_from_an_empty_folder_is_refused_where_a_checkpoint_is_needed(tmp_path, is_needed, codes):
    run, folder = tmp_path / "run", tmp_path / "own"
    write_config(run, save=str(folder), load=str(folder), exit_on_missing_checkpoint=is_needed)
    assert train(run) == codes
    assert folder.exists() is not is_needed
    if not is_needed:
        assert f"starting from new weights: {folder} holds no checkpoint yet" in log_of(run, 1)
    if is_needed:
        assert f"checkpoint.load: {folder} does not exist, and checkpoint.exit_on_missing_checkpoint" in error_of(
            run, 1
        )


def test_a_fine_tuning_that_starts_again_goes_on_from_its_own_checkpoints(tmp_path):
    run, folder, start = tmp_path / "run", tmp_path / "start-finetuned", tmp_path / "start"
    write_config(run, save=str(start))
    assert train(run) == [0]
    shutil.rmtree(run)
    write_config(run, save=str(folder), load=str(start), finetune=True, train_iters=2)
    assert train(run) == [0]
    assert "starting from the weights of " in log_of(run, 1)
    write_config(run, save=str(folder), load=str(start), finetune=True, train_iters=6)
    assert train(run, 2) == [0]
    assert f"resuming from {folder}/iter_0000002 at iteration 2" in log_of(run, 2)
    assert complete_iterations(folder) == [2, 4, 6] and complete_iterations(start) == [2, 4]


def hide(folder):
    """Cover ``folder`` with an empty file system for this process only, like a node without the mount."""
    new_mounts, private, recursive = 0x00020000, 1 << 18, 1 << 14
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(new_mounts) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, private | recursive, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, None) == 0, os.strerror(ctypes.get_errno())


class Hidden:
    """A fault of one rank: ``hide``."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self):
        hide(self.folder)


@needs_root
@pytest.mark.parametrize("rank", [0, 1])
def test_a_mount_that_one_node_lacks_ends_all_ranks_and_is_named_by_that_one(tmp_path, rank):
    run, folder = tmp_path / "run", tmp_path / "own"
    write_config(run, save=str(folder))
    assert train(run, ranks=2) == [0, 0]
    write_config(run, save=str(folder), train_iters=8)
    assert train(run, 2, 2, {rank: Hidden(folder)}) == [1, 1]
    assert error_of(run, 2, rank).startswith(f"checkpoint folder {folder} is empty on ")
    assert not (run / f"attempts/2/errors/rank-{1 - rank:05d}.json").exists(), (
        "only a rank without the mount is at fault"
    )
    assert error_of(run, 2, rank) in (run / f"attempts/2/rank-{1 - rank:05d}.log").read_text()
    assert complete_iterations(folder) == [2, 4]


class BindMount:
    """A mount point, and the disk that is mounted there."""

    def __init__(self, place):
        self.point, self.disk = place / "point", place / "disk"
        self.point.mkdir()
        self.disk.mkdir()

    def mount(self):
        subprocess.run(["mount", "--bind", self.disk, self.point], check=True)

    def unmount(self):
        subprocess.run(["umount", "--lazy", self.point], check=True)


@pytest.fixture
def bind_mount(tmp_path):
    mounted = BindMount(tmp_path)
    mounted.mount()
    yield mounted
    subprocess.run(["umount", "--quiet", "--lazy", mounted.point], check=False, capture_output=True)


@needs_root
def test_a_mount_that_goes_while_a_run_trains_leaves_nothing_below_it(tmp_path, bind_mount):
    run = tmp_path / "run"
    write_config(run, train_iters=1_000_000, save=str(bind_mount.point), keep_last=2, missed_saves_grace_s=0)
    with Job(run, 1) as job:
        # The record follows the whole publication.
        wait_for(lambda: (run / "saved.json").exists() and saved(run)["iteration"], "a checkpoint")
        bind_mount.unmount()
        assert job.ends([0]) == [1]
    assert "its mount is gone, and an empty folder is in its place" in error_of(run, 1)
    assert list(bind_mount.point.iterdir()) == []
    assert saved(run)["iteration"] in complete_iterations(bind_mount.disk)


@needs_root
def test_only_an_empty_folder_in_the_place_of_a_mount_is_a_lost_mount(bind_mount):
    (bind_mount.disk / "iter_0000002").mkdir()
    known = MountedFolder()
    known.remember(bind_mount.point)
    bind_mount.unmount()
    with pytest.raises(OSError, match="its mount is gone"):
        known.check(bind_mount.point)
    bind_mount.mount()
    known.check(bind_mount.point)
    shutil.rmtree(bind_mount.point / "iter_0000002")
    known.check(bind_mount.point)


@needs_root
def test_a_mount_that_goes_before_the_first_checkpoint_is_noticed_by_its_file_system(tmp_path):
    known = MountedFolder()
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        known.remember(tmp_path)
        known.check(tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
    with pytest.raises(OSError, match="its mount is gone"):
        known.check(tmp_path)
