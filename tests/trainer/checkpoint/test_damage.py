"""Damage to the bytes of complete checkpoints: every load finds it, and all ranks read the one before."""

import contextlib
import io
import json
import shutil

import pytest
import torch

from tests.trainer.checkpoint.test_checkpoint import CPU, VOCAB_SIZE, build, config_of, step
from trainer.checkpoint import save as save_module
from trainer.checkpoint.checksums import (
    BLOCK_BYTES,
    ChecksumWriter,
    VerifiedFile,
    checksum_file,
    sampled_blocks,
)
from trainer.checkpoint.directory import CheckpointError, checkpoint_path, complete_iterations
from trainer.checkpoint.resume import restore
from trainer.checkpoint.save import CheckpointWriter
from trainer.checkpoint.verification import find_damage
from trainer.process.progress import TrainingProgress

RANKS = 2

NEWEST = "iter_0000002"


def save_two(rank, world_size, root, config):
    model, optimizer = build(config, rank, world_size)
    writer = CheckpointWriter(root, config, VOCAB_SIZE, 1, CPU)
    writer.prepare(rank)
    for iteration in (1, 2):
        step(model, optimizer, iteration)
        assert writer.save(model, optimizer, TrainingProgress(iteration=iteration)) is None


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    ranks.run(save_two, root, config_of(tp=2))
    return root


def alter(path, position, mask=0x40):
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def zero(path, count=1024):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(count) + data[len(data) // 2 + count :])


DAMAGES = {
    "a bit of a weight": ("model_rank00001.safetensors", lambda path: alter(path, -1)),
    "a bit of a master or moment": ("optimizer_rank00000.safetensors", lambda path: alter(path, -5)),
    "zeros": ("optimizer_rank00001.safetensors", zero),
    "a bit of the header": ("model_rank00000.safetensors", lambda path: alter(path, 20, 1)),
    "the size of the header": ("model_rank00001.safetensors", lambda path: alter(path, 6)),
    "cut off": ("model_rank00001.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-8])),
    "missing": ("optimizer_rank00001.safetensors", lambda path: path.unlink()),
    "a digit of the metadata": (
        "metadata.json",
        lambda path: path.write_text(path.read_text().replace('"iteration": 2', '"iteration": 3')),
    ),
    "half of the metadata": ("metadata.json", lambda path: path.write_text(path.read_text()[:300])),
}


def resume_damaged(rank, world_size, root, config):
    """Restore; returns the checkpoint, what was printed, and a sum over weights and moments."""
    model, optimizer = build(config, rank, world_size)
    out, progress = io.StringIO(), TrainingProgress()
    with contextlib.redirect_stdout(out):
        path = restore(config, root, model, optimizer, progress, CPU)
    total = sum(
        tensor.double().abs().sum().item() for named in optimizer.tensors().values() for tensor in named.values()
    )
    total += sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters.values())
    return path.name, progress.iteration, total, out.getvalue()


@pytest.mark.parametrize("what", DAMAGES)
def test_the_one_before_is_read_by_all_ranks(ranks, saved, tmp_path, what):
    root = shutil.copytree(saved, tmp_path / "checkpoints")
    name, damage = DAMAGES[what]
    damage(root / NEWEST / name)
    shutil.copytree(root / "iter_0000001", tmp_path / "alone" / "iter_0000001")
    config = config_of(tp=2)
    expected = ranks.run(resume_damaged, tmp_path / "alone", config)
    found = ranks.run(resume_damaged, root, config)
    assert [one[:3] for one in found] == [one[:3] for one in expected]
    assert found[0][:2] == ("iter_0000001", 1)
    assert NEWEST in found[0][3] and name in found[0][3]
    assert "resuming from iter_0000001, the newest undamaged checkpoint" in found[0][3]
    assert found[1][3] == ""
    assert name in str(find_damage(root / NEWEST))
    assert find_damage(root / "iter_0000001") is None


def test_another_layout_verifies_what_it_reads(ranks, saved, tmp_path):
    root = shutil.copytree(saved, tmp_path / "checkpoints")
    alter(root / NEWEST / "model_rank00001.safetensors", -3)
    (found,) = ranks.run(resume_damaged, root, config_of(), world_size=1)
    assert found[:2] == ("iter_0000001", 1)


def refuse(rank, world_size, root, config):
    with pytest.raises(Exception) as error:  # noqa: PT011
        resume_damaged(rank, world_size, root, config)
    return type(error.value).__name__, str(error.value)


def test_only_damaged_checkpoints_end_the_start(ranks, saved, tmp_path):
    root = shutil.copytree(saved, tmp_path / "checkpoints")
    for iteration in (1, 2):
        alter(checkpoint_path(root, iteration) / "optimizer_rank00001.safetensors", -1)
    first, second = ranks.run(refuse, root, config_of(tp=2))
    assert first[0] == CheckpointError.__name__
    assert "holds no undamaged checkpoint" in first[1]
    assert second[0] == "PeerFailedError"


def test_a_checkpoint_of_an_older_release_is_read_unverified(ranks, saved, tmp_path):
    root = shutil.copytree(saved, tmp_path / "checkpoints")
    path = root / NEWEST / "metadata.json"
    values = json.loads(path.read_text())
    del values["checksums"], values["checksum"]
    path.write_text(json.dumps(values))
    alter(root / NEWEST / "model_rank00001.safetensors", -1)
    found = ranks.run(resume_damaged, root, config_of(tp=2))
    assert found[0][:2] == (NEWEST, 2)
    assert found[0][3] == f"{root / NEWEST} is of a release without checksums; its contents were not verified\n"


def save_on_a_lying_disk(rank, world_size, root, config):
    """Save with a disk that alters a byte of what rank 1 writes, then without."""
    model, optimizer = build(config, rank, world_size)
    writer = CheckpointWriter(root, config, VOCAB_SIZE, 2, CPU)
    write = save_module.write_rank_file

    def lie(path, tensors):
        written = write(path, tensors)
        if rank == 1:
            alter(path, -1)
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "write_rank_file", lie)
        missed = writer.save(model, optimizer, TrainingProgress(iteration=3))
    kept = complete_iterations(root)
    return missed, kept, writer.save(model, optimizer, TrainingProgress(iteration=3))


@pytest.mark.parametrize("amount", ["sample", "all"])
def test_what_is_read_back_must_be_what_was_written(ranks, saved, tmp_path, amount):
    root = shutil.copytree(saved, tmp_path / "checkpoints")
    config = config_of(tp=2, checkpoint={"keep_last": 1, "verify_after_save": amount})
    (first, kept, again), (second, _, _) = ranks.run(save_on_a_lying_disk, root, config)
    assert first.sentence == second.sentence
    assert "rank00001.safetensors, read back after the write, has altered bytes" in first.sentence
    assert (first.is_here, second.is_here) == (False, True)
    assert kept == [1, 2]
    assert again is None
    assert complete_iterations(root) == [3]


def test_checksums_are_those_of_the_blocks(tmp_path):
    path = tmp_path / "file"
    data = bytes(torch.randint(0, 256, (2 * BLOCK_BYTES + 5,), dtype=torch.uint8).numpy())
    with path.open("wb") as file, ChecksumWriter(file) as writer:
        for first, stop in ((0, 3), (3, BLOCK_BYTES + 7), (BLOCK_BYTES + 7, len(data))):
            writer.write(data[first:stop])
        written = writer.close()
    assert path.read_bytes() == data
    assert (written.size, written.checksums) == (len(data), checksum_file(path))
    alter(path, BLOCK_BYTES + 1)
    with contextlib.closing(VerifiedFile(path, written.checksums)) as verified:
        assert verified.find_damage(0, BLOCK_BYTES) is None
        assert verified.find_damage(2 * BLOCK_BYTES, len(data)) is None
        assert verified.find_damage(5, BLOCK_BYTES + 1) == "has altered bytes between 4,194,304 and 8,388,608"
        assert verified.find_any_damage() == "has altered bytes between 4,194,304 and 8,388,608"
        assert verified.find_damage_on_disk([0, 2]) is None
        assert verified.find_damage_on_disk(range(3)) == "has altered bytes between 4,194,304 and 8,388,608"
    assert sampled_blocks(0, 3) == []
    assert sampled_blocks(1, 3) == [0]
    assert {block for turn in range(16) for block in sampled_blocks(40, turn)} == set(range(40))
