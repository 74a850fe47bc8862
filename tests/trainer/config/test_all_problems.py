"""All problems of a config are told at once: of its values, and of their relations."""

import pytest

from trainer.config.errors import ConfigError, joined
from trainer.planning.build_config import build_config

GOOD = {
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4},
    "training": {"train_iters": 10, "seq_length": 64},
    "optimizer": {"lr": 1e-3},
}


def problems_of(**changes):
    """Keys of the problems of a config, and the text of the error."""
    values = {name: {**GOOD.get(name, {}), **changes.get(name, {})} for name in GOOD.keys() | changes.keys()}
    with pytest.raises(ConfigError) as caught:
        build_config(values)
    return [error.key for error in caught.value.all], str(caught.value)


def test_values():
    keys, text = problems_of(
        model={"num_layers": "abc"}, training={"train_itres": 3, "seq_length": -1}, optimizer={"lr": None}
    )
    assert keys == ["training.train_itres", "model.num_layers", "training.seq_length", "optimizer.lr"]
    assert [line.split(": ")[:2] for line in text.splitlines()[1:]] == [["also", key] for key in keys[1:]]


def test_a_misspelt_key_is_not_told_as_missing_too():
    values = {**GOOD, "model": {"num_layer": 4, "hidden_size": 64}}
    with pytest.raises(ConfigError) as caught:
        build_config(values)
    assert [error.key for error in caught.value.all] == ["model.num_layer", "model.num_attention_heads"]


def test_relations():
    keys, _ = problems_of(
        model={"num_query_groups": 3, "bert_binary_head": False},
        optimizer={"min_lr": 1.0},
        parallel={"pipeline_schedule": "interleaved"},
    )
    assert keys == [
        "model.num_query_groups",
        "parallel.pipeline_schedule",
        "model.bert_binary_head",
        "optimizer.min_lr",
    ]


def test_a_value_of_several_types_is_one_problem_of_its_key():
    keys, text = problems_of(optimizer={"lr_decay_iters": -5}, training={"kernel_backends": {"rope": 3}})
    assert keys == ["training.kernel_backends.rope", "optimizer.lr_decay_iters"]
    assert "also: optimizer.lr_decay_iters: -5 is not valid: input should be greater than 0" in text


def test_one_problem_for_each_key():
    error = joined([ConfigError("a", "one"), ConfigError("b", "two", [ConfigError("a", "three")])])
    assert str(error) == "a: one\nalso: b: two"
