"""Numbers of nodes, the global batch of each, and what a short run changes in the config."""

import pytest

from llmctl.errors import UsageError
from llmctl.operate.scale.settings import changed_values, compared_values
from llmctl.operate.scale.sizes import batches_of, parse_sizes


def config(batch=None, **training):
    given = {"micro_batch_size": 2, **({"global_batch_size": batch} if batch else {}), **training}
    return {"training": given, "parallel": {"tensor_model_parallel_size": 2}}


def changed(values, batch=8, steps=20):
    return {flag.key: flag.value for flag in changed_values(values, batch, steps)}


def test_sizes_are_sorted_and_each_is_there_once():
    assert parse_sizes("4, 1,2,1") == (1, 2, 4)


@pytest.mark.parametrize("text", ["", "1,", "0,1", "-1", "2x", "1.5", "²"])
def test_sizes_that_are_not_numbers_of_nodes_are_refused(text):
    with pytest.raises(UsageError, match=r"--nodes .*is not a number of nodes; give numbers from 1, such as 1,2,4,8"):
        parse_sizes(text)


def test_strong_scaling_has_one_batch():
    found = batches_of(config(32), {1: 4, 2: 8, 4: 16}, is_weak=False)
    assert (found.of, found.problem) == ({1: 32, 2: 32, 4: 32}, "")


def test_weak_scaling_has_as_many_samples_per_node():
    assert batches_of(config(8), {1: 4, 2: 8, 4: 16}, is_weak=True).of == {1: 8, 2: 16, 4: 32}
    # A size that is not a multiple of the smallest one.
    found = batches_of(config(8), {2: 8, 3: 12}, is_weak=True)
    assert (found.of, found.problem) == ({2: 8, 3: 12}, "")


def test_a_batch_that_some_sizes_cannot_divide_comes_with_the_nearest_that_all_can():
    """Two samples of 8 replicas are a round of 16; of 3 nodes with 6 replicas, 12: both divide 48."""
    found = batches_of(config(20), {1: 4, 3: 12, 4: 16}, is_weak=False)
    assert "global_batch_size: 20 cannot be divided among the replicas of 3, 4 nodes" in found.problem
    assert found.problem.endswith("use 48, the nearest for --nodes 1,3,4: --set training.global_batch_size=48")
    assert found.of == {1: 48, 3: 48, 4: 48}
    weak = batches_of(config(6), {1: 4, 2: 8}, is_weak=True)
    assert "use 4 or 8, the nearest" in weak.problem and weak.of == {1: 8, 2: 16}


def test_an_unset_batch_is_the_smallest_that_goes_with_all_sizes():
    found = batches_of(config(), {1: 4, 3: 12, 4: 16}, is_weak=False)
    assert found.of == {1: 48, 3: 48, 4: 48} and "is unset; all sizes have 48" in found.note
    weak = batches_of(config(), {1: 4, 4: 16}, is_weak=True)
    assert (weak.of, weak.note) == ({1: 4, 4: 16}, "")


def test_a_batch_in_steps_counts_with_its_last_size():
    steps = config(step_batch_size_schedule="0:16 1M:64", seq_length=1024)
    assert batches_of(steps, {1: 4, 2: 8}, is_weak=False).of == {1: 64, 2: 64}


def test_further_sizes_go_on_from_the_batch_of_those_that_have_run():
    assert batches_of(config(), {1: 4, 2: 8, 4: 16}, is_weak=False, known=(1, 32)).of == {1: 32, 2: 32, 4: 32}
    assert batches_of(config(8), {1: 4, 2: 8}, is_weak=True, known=(2, 16)).of == {1: 8, 2: 16}
    with pytest.raises(UsageError, match="--nodes 1: the batch of 4 samples on 3 nodes, which has run"):
        batches_of(config(4), {1: 4, 3: 12}, is_weak=True, known=(3, 4))


def test_a_short_run_saves_as_little_as_it_can_and_evaluates_nothing():
    found = changed({"training": {"train_iters": 1000}, "checkpoint": {"save": "/kept", "save_interval": 5}})
    assert found["training.train_iters"] == 20 and found["training.global_batch_size"] == 8
    assert found["checkpoint.save"] is None and found["checkpoint.save_interval"] is None
    assert found["checkpoint.no_save_optim"] is True and found["training.eval_iters"] == 0
    assert found["logging.log_interval"] == 1


def test_the_learning_rate_follows_the_schedule_of_the_whole_run():
    assert changed({"training": {"train_iters": 1000}})["optimizer.lr_decay_iters"] == 1000
    given = {"training": {"train_iters": 1000}, "optimizer": {"lr_decay_iters": 500}}
    assert "optimizer.lr_decay_iters" not in changed(given)


@pytest.mark.parametrize(
    ("checkpoint", "key", "value"),
    [
        ({"load": "/a", "save": "/a/"}, "checkpoint.load", None),
        ({"load": "/a", "save": "/b"}, "checkpoint.finetune", True),
        ({"load": "/a"}, "checkpoint.finetune", True),
    ],
)
def test_a_short_run_begins_at_step_0(checkpoint, key, value):
    assert changed({"checkpoint": checkpoint})[key] == value


def test_a_spike_rolls_nothing_back():
    assert changed({"training": {"on_loss_spike": "roll_back"}})["training.on_loss_spike"] == "tell"


def test_what_has_no_effect_on_speed_is_not_compared():
    values = {"job": {"name": "a", "time": "1h", "nodes": 3, "queue": "q"}, "training": {"seq_length": 8}}
    assert compared_values(values) == {"job.queue": "q", "training.seq_length": 8}
