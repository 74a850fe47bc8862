"""A dataset of the user's own: its order, its labels that count, and mistakes."""

import numpy as np
import pytest
import torch

from tests.trainer.hooks.hooked_run import log, rows, train
from tests.trainer.parity.deviation import LIMITS
from trainer.config.errors import ConfigError
from trainer.data.errors import DataError
from trainer.data.loading.build import build_data
from trainer.data.samples.batches import BatchShape, TrainData
from trainer.data.samples.user_dataset import UserOrder, UserSamples
from trainer.hooks.user_function import HookError, UserFunction
from trainer.planning.build_config import build_config

HOOK = UserFunction("hooks.dataset_function", "mine:dataset", len)
MINE = """
def few(split, config):
    import my_hooks
    return my_hooks.Progressions(19, 0, config) if split == "train" else None
"""


class Items(list):
    """Items as they are."""


def numbered(count=5, length=4):
    return Items([np.arange(length + 1) + index for index in range(count)])


def samples(items, length=4, seed=1, vocab_size=100):
    return UserSamples(HOOK, "train", items, length, vocab_size, seed)


def test_each_epoch_has_every_item_once_in_its_own_order():
    found = samples(numbered())
    epochs = [[int(found.sample(epoch * 5 + place)[0]) for place in range(5)] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [[0, 1, 2, 3, 4]] * 3
    assert epochs[0] != epochs[1]
    assert epochs == [[int(samples(numbered()).sample(5 * e + p)[0]) for p in range(5)] for e in range(3)]
    unshuffled = numbered()
    unshuffled.shuffle = False
    assert [int(samples(unshuffled).sample(place)[0]) for place in range(7)] == [0, 1, 2, 3, 4, 0, 1]


def test_every_replica_has_its_share_and_its_masks():
    items = Items([(torch.full((5,), index), torch.tensor([1, 1, 0, index % 2])) for index in range(8)])
    items.shuffle = False
    found = samples(items)
    shares = [TrainData({"train": found}, 100, BatchShape(2, 8, 4, 2, rank), has_masks=True) for rank in range(2)]
    seen = [batch for share in shares for batch in share.micro_batches("train", 0)]
    assert [batch.tokens[:, 0].tolist() for batch in seen] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert all(batch.loss_mask.tolist() == [[1, 1, 0, 0], [1, 1, 0, 1]] for batch in seen)
    assert all(share.masks_loss for share in shares)


WRONG = {
    "returned 3 for split train; a dataset has len() and items by number": 3,
    "returned a dataset without items for split train": Items(),
    "tokens are integers of shape [5], training.seq_length + 1, not int64 [4]": Items([np.arange(4)]),
    "not float64 [5]": Items([np.arange(5.0)]),
    "token 100 is not in the vocabulary of 100": Items([np.arange(96, 101)]),
    "labels that count have the shape [4], one per label, not [5]": Items([(np.arange(5), np.ones(5))]),
    "failed at item 0 of split train: KeyError: 0": {"a": 1},
}


@pytest.mark.parametrize(("said", "items"), WRONG.items())
def test_another_form_is_refused_before_training(said, items):
    with pytest.raises(HookError) as caught:
        samples(items)
    assert str(caught.value).startswith("hooks.dataset_function: mine:dataset ")
    assert said in str(caught.value)


def test_an_item_of_another_form_names_its_number():
    mixed = numbered()
    mixed[3] = (mixed[3], np.ones(4))
    mixed.shuffle = False
    with pytest.raises(HookError, match="has a wrong item 3 of split train: all items are tokens, or all are pairs"):
        samples(mixed).sample(3)


def order(count=5, seed=1, shuffle=True):
    items = numbered(count)
    items.shuffle = shuffle
    return UserOrder("mine:dataset", samples(items, seed=seed), seed)


def test_a_resume_in_another_order_is_refused():
    assert order().restore(order().state(), 8) is None
    # Without shuffling the seed orders nothing.
    assert order(shuffle=False, seed=2).restore(order(shuffle=False).state(), 8) is None
    for other, said in (
        (order(count=6), "was trained with 5 items, but this run has 6 items"),
        (order(seed=2), "was trained with training.seed 1, but this run has training.seed 2"),
        (order(shuffle=False), "was trained with shuffle True, but this run has shuffle False"),
    ):
        with pytest.raises(DataError, match=said):
            other.restore(order().state(), 8)
    assert "trained on other data; hooks.dataset_function goes on at sample 8" in order().restore({"datasets": []}, 8)


def test_replicas_train_as_one_rank_does_over_several_epochs(tmp_path):
    found = [rows(train(tmp_path / layout, layout)) for layout in ("serial", "dp2")]
    for serial, other in zip(*found, strict=True):
        key = "lm_loss" if "lm_loss" in serial[3] else "valid_loss"
        assert [row[key] for row in other.values()] == pytest.approx(
            [row[key] for row in serial.values()], abs=LIMITS["fp32"]["loss"]
        )


def test_a_run_without_a_valid_split_says_so_and_another_length_is_no_resume(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    run = train(tmp_path / "run", "serial", training={"exit_interval": 3})
    train(run, "serial", 2, folders=[tmp_path], code=3, hooks={"dataset_function": "mine:few"})
    assert "hooks.dataset_function: the checkpoint was trained with 20 items, but this run has 19 items" in log(run, 2)
    other = train(tmp_path / "other", "serial", folders=[tmp_path], hooks={"dataset_function": "mine:few"})
    assert "no evaluation during training: there is no valid split" in log(other)
    assert not rows(other)[1]


def nothing(split, config):
    return None if config else split


def config(hooks, **sections):
    values = {
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10},
        "training": {"train_iters": 2, "seq_length": 8},
        "optimizer": {"lr": 1.0},
        **sections,
    }
    return build_config({**values, "hooks": hooks})


def test_nothing_to_train_on_is_refused():
    with pytest.raises(DataError, match="nothing returned None for split train; return a dataset"):
        build_data(config({"dataset_function": f"{__name__}:nothing"}), 0, 1)


OTHERS = {
    "data_path": ["/a"],
    "valid_data_path": ["/a"],
    "mock_data": True,
    "sample_packing": True,
    "sample_order": "megatron",
}


@pytest.mark.parametrize(("key", "value"), OTHERS.items())
def test_other_data_is_refused_beside_it(key, value):
    with pytest.raises(ConfigError) as caught:
        config({"dataset_function": "mine:dataset"}, data={key: value})
    assert str(caught.value).startswith(f"data.{key}: cannot be combined with hooks.dataset_function")
