"""Copies of the state on nodes: put back, the next steps have the same bits, also after the loss of a node."""

import shutil

import pytest
import torch

from tests.trainer.checkpoint.test_training import VOCAB_SIZE, build, iterate
from tests.trainer.parity.parity_case import Case
from trainer.checkpoint.copies.restoring import Limits, restore_from_copies
from trainer.checkpoint.copies.state_copies import StateCopies
from trainer.process.launch_environment import LaunchEnvironment
from trainer.process.progress import TrainingProgress

CPU = torch.device("cpu")
COPIED_AFTER = 2
ANY = Limits(0, 1)
FREE = 1 << 40

LAYOUTS = {
    "dp2 bf16": Case(dp=2, micro_batches=2, precision="bf16"),
    "zero1 bf16": Case(dp=2, micro_batches=2, precision="bf16", zero=1),
    "zero1 remainders": Case(dp=2, micro_batches=2, precision="bf16", zero=1, remainders=True),
    "zero3 fp16": Case(dp=2, micro_batches=2, precision="fp16", zero=3),
    "tp2 pp2": Case("qwen", tp=2, pp=2, micro_batches=2),
    "experts": Case("mixtral", dp=2, ep=2, micro_batches=2, zero=1),
    "biased experts": Case("deepseek", dp=2, micro_batches=2, zero=1, layers=7),
}


def open_copies(rank, world_size, config, model, optimizer, folder, per_node, attempt=1, submission=1):
    """The copies of a rank whose node has ``per_node`` ranks, and a folder of its own."""
    node = folder / f"node-{rank // per_node}"
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"copy_folder": str(node)})})
    launch = LaunchEnvironment(rank, rank % per_node, world_size, per_node)
    run = folder / "run"
    numbers = (submission, attempt)
    copies = StateCopies.open(config, VOCAB_SIZE, launch, run, numbers, model, optimizer, CPU)
    assert not copies.problem
    return copies


def train_and_copy(rank, world_size, case, folder, per_node, times=1, attempt=1):
    """Copy after two iterations, and ``times`` more, each an iteration later; returns the results of two more."""
    config, model, optimizer = build(rank, world_size, case)
    copies = open_copies(rank, world_size, config, model, optimizer, folder, per_node, attempt)
    for iteration in range(COPIED_AFTER + times - 1):
        iterate(case, model, optimizer, iteration)
        if iteration >= COPIED_AFTER - 1:
            copies.drain(copies.stage(model, optimizer, TrainingProgress(iteration=iteration + 1, seed=7)))
    iteration = COPIED_AFTER + times - 1
    staged = copies.stage(model, optimizer, TrainingProgress(iteration=iteration, seed=7))
    seen = [iterate(case, model, optimizer, iteration + number) for number in range(2)]
    # What is written is older than these steps.
    copied = copies.drain(staged)
    assert not copied.problem and copied.size > 0
    return seen


def go_on(rank, world_size, case, folder, per_node, limits=ANY, attempt=2, submission=1):
    """Sentences, and the results of the two iterations after the copies; none without copies."""
    config, model, optimizer = build(rank, world_size, case)
    copies = open_copies(rank, world_size, config, model, optimizer, folder, per_node, attempt, submission)
    progress = TrainingProgress()
    choice, told = restore_from_copies(copies, limits, model, optimizer, progress)
    if choice is None:
        return told, None, []
    return told, progress.iteration, [iterate(case, model, optimizer, progress.iteration + n) for n in range(2)]


def names(folder):
    return sorted(path.name for path in folder.rglob("rank-*") if path.suffix != ".json")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_state_put_back_continues_with_the_same_bits(ranks, tmp_path, name):
    case = LAYOUTS[name]
    per_node = case.world_size // 2
    went_on = ranks.run(train_and_copy, case, tmp_path, per_node, world_size=case.world_size)
    # Own copies, and those of the neighbour.
    assert len(names(tmp_path)) == 2 * case.world_size
    found = ranks.run(go_on, case, tmp_path, per_node, world_size=case.world_size)
    assert found == [([], COPIED_AFTER, results) for results in went_on]
    # Node 1 is lost: its state is on node 0.
    shutil.rmtree(tmp_path / "node-1")
    found = ranks.run(go_on, case, tmp_path, per_node, world_size=case.world_size)
    assert found == [([], COPIED_AFTER, results) for results in went_on]


ONE = Case(dp=2, micro_batches=2, precision="bf16", zero=1)


def alter(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_copy_gives_way_to_that_of_the_neighbour_then_to_none(ranks, tmp_path):
    went_on = ranks.run(train_and_copy, ONE, tmp_path, 1, world_size=2)
    own = tmp_path / "node-1/llmctl-copies-run/rank-00001.iter-0000002.by-00001"
    alter(own)
    first, second = ranks.run(go_on, ONE, tmp_path, 1, world_size=2)
    sentence = f"the copy {own.name} in {tmp_path / 'node-0'}, read by rank 1, has altered bytes"
    assert first == ([sentence], COPIED_AFTER, went_on[0])
    assert second[1:] == (COPIED_AFTER, went_on[1])
    assert not own.exists()
    neighbours = tmp_path / "node-0/llmctl-copies-run/rank-00001.iter-0000002.by-00000"
    neighbours.write_bytes(neighbours.read_bytes()[:-1])
    told, iteration, _ = ranks.run(go_on, ONE, tmp_path, 1, world_size=2)[0]
    assert iteration is None
    assert told[0].startswith(f"the copy {neighbours.name} in ") and "cannot be read: ends at byte " in told[0]
    assert told[1] == "of iteration 2 no sound copy is left of rank 1"


def test_a_copy_that_a_kill_has_cut_off_leaves_the_one_before(ranks, tmp_path):
    """Until all ranks have the new one, each keeps the old one."""
    went_on = ranks.run(train_and_copy, ONE, tmp_path / "older", 1, world_size=2)
    ranks.run(train_and_copy, ONE, tmp_path / "newer", 1, 2, world_size=2)
    assert {name.split(".")[1] for name in names(tmp_path / "newer")} == {"iter-0000003"}
    for path in (tmp_path / "newer/node-0/llmctl-copies-run").glob("rank-00000*"):
        shutil.copy(path, tmp_path / "older/node-0/llmctl-copies-run" / path.name)
    found = ranks.run(go_on, ONE, tmp_path / "older", 1, world_size=2)
    assert found == [([], COPIED_AFTER, results) for results in went_on]


def test_ranks_that_have_moved_to_other_nodes_find_their_state(ranks, tmp_path):
    """Node 1 of four is lost, a spare one is the last: the ranks of nodes 2 and 3 move by one node."""
    case = Case("qwen", tp=2, pp=2, micro_batches=2)
    went_on = ranks.run(train_and_copy, case, tmp_path, 1, world_size=4)
    shutil.rmtree(tmp_path / "node-1")
    for node in (2, 3):
        (tmp_path / f"node-{node}").rename(tmp_path / f"node-{node - 1}")
    found = ranks.run(go_on, case, tmp_path, 1, world_size=4)
    assert found == [([], COPIED_AFTER, results) for results in went_on]


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        (ONE.but(zero=0), {}, "those of iteration 2 are of another layout or config"),
        (ONE, {"submission": 2}, ""),
        (ONE, {"limits": Limits(2, 1)}, ""),
        (ONE, {"limits": Limits(0, 2)}, ""),
    ],
)
def test_copies_of_another_layout_or_job_or_older_ones_are_not_used(ranks, tmp_path, case, changes, reason):
    ranks.run(train_and_copy, ONE, tmp_path, 1, world_size=2)
    limits, submission = changes.get("limits", ANY), changes.get("submission", 1)
    found = ranks.run(go_on, case, tmp_path, 1, limits, 2, submission, world_size=2)
    assert found == [([reason] if reason else [], None, [])] * 2
