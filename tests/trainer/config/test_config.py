"""TrainConfig: accepted values, and the message of each refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import HANG_S
from trainer.config.errors import ConfigError
from trainer.config.other_names import OTHER_NAMES
from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import (
    build_config,
    known_keys,
    load_config,
    megatron_flag_problem,
    unknown_key_problem,
)
from trainer.planning.checks import check_world_size


def values(**sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4},
        "training": {"train_iters": 10, "seq_length": 64},
        "optimizer": {"lr": 1e-3},
    }
    for section, keys in sections.items():
        base.setdefault(section, {}).update(keys)
    return base


def refusal(world_size: int | None = None, **sections: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config = build_config(values(**sections))
        assert world_size is not None
        check_world_size(config, world_size)
    assert "\n" not in str(caught.value)
    return caught.value


def test_other_names_lead_to_keys_and_hide_none() -> None:
    keys = known_keys()
    for name, meant in OTHER_NAMES.items():
        assert any(key in meant for key in keys), name
        assert not any(key.endswith(f".{name}") for key in keys), name
        assert megatron_flag_problem(name, keys) is None, name


def test_an_unknown_key_is_answered_with_a_few_names() -> None:
    problem = unknown_key_problem("model.zzzz")
    assert problem.count(",") < 8
    assert problem.endswith("more; `llmctl explain model.KEY` explains one")


def test_equal_after_a_round_trip_through_yaml() -> None:
    config = build_config(
        values(model={"swiglu": True, "num_query_groups": 2}, data={"data_path": ["/a/b"]}, job={"env": {"A": "b"}})
    )
    assert build_config(yaml.safe_load(yaml.safe_dump(config.model_dump()))) == config


@pytest.mark.parametrize(
    ("sections", "key", "says"),
    [
        ({"model": {"num_layer": 3}}, "model.num_layer", "did you mean model.num_layers?"),
        ({"parallel": {"num_layers": 3}}, "parallel.num_layers", "did you mean model.num_layers?"),
        ({"model": {"num-layers": 3}}, "model.num-layers", "did you mean model.num_layers?"),
        ({"optimizer": {"learning_rate": 3}}, "optimizer.learning_rate", "did you mean optimizer.lr?"),
        ({"parallel": {"TP": 2}}, "parallel.TP", "did you mean parallel.tensor_model_parallel_size?"),
        ({"training": {"batch_size": 2}}, "training.batch_size", "use training.micro_batch_size"),
        (
            {"logging": {"zzzz": 2}},
            "logging.zzzz",
            "more; `llmctl explain logging.KEY` explains one",
        ),
        ({"model": {"rope_theta": 3}}, "model.rope_theta", "is Megatron-LM's --rope-theta; use model.rotary_base"),
        ({"model": {"use-flash-attn": True}}, "model.use-flash-attn", "has no key here: --attention-backend selects"),
        ({"parallel": {"nnodes": 2}}, "parallel.nnodes", "--nnodes, which is a flag of the launcher"),
        ({"training": {"train_samples": 2}}, "training.train_samples", "use training.train_iters"),
        ({"modl": {"num_layers": 3}}, "modl", "did you mean model?"),
        ({"zzzz": {"q": 3}}, "zzzz", "the sections are job, model, parallel"),
        ({"job": {"preflight": "deep"}}, "job.preflight", "'off' or 'quick'"),
        ({"job": {"spare_nodes": -1}}, "job.spare_nodes", "greater than or equal to 0"),
        ({"job": {"hang_timeout_s": 29}}, "job.hang_timeout_s", "29 is not valid: give 30 or more"),
        ({"job": {"time": 5400}}, "job.time", "5400 is not valid: give units, as in 90m or 5h, or H:M:S in quotes"),
        ({"model": {"num_layers": 0}}, "model.num_layers", "greater than 0"),
        ({"model": {"num_layers": True}}, "model.num_layers", "not true or false"),
        ({"model": {"num_layers": "four"}}, "model.num_layers", "'four'"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr", "finite"),
        ({"model": {"num_attention_heads": 5}}, "model.num_attention_heads", "1, 2, 4, 8, 16, 32, 64"),
        ({"model": {"num_query_groups": 3}}, "model.num_query_groups", "1, 2, 4"),
        ({"model": {"group_query_attention": True}}, "model.num_query_groups", "group_query_attention needs it"),
        (
            {"parallel": {"tensor_model_parallel_size": 3}},
            "parallel.tensor_model_parallel_size",
            "3 does not divide model.num_attention_heads 4; use one of 1, 2, 4",
        ),
        (
            {"parallel": {"pipeline_model_parallel_size": 7}},
            "parallel.pipeline_model_parallel_size",
            "4 layers, embedding and LM head are only 6 parts; use at most 6, or 5 layers",
        ),
        (
            {"parallel": {"tensor_model_parallel_size": 4, "sequence_parallel": True}, "training": {"seq_length": 63}},
            "training.seq_length",
            "use 60 or 64",
        ),
        ({"training": {"bf16": True, "fp16": True}}, "training.fp16", "cannot be combined with bf16"),
        ({"model": {"max_position_embeddings": 32}}, "model.max_position_embeddings", "use at least that"),
        (
            {"model": {"max_position_embeddings": 32, "position_embedding_type": "rope"}},
            "model.max_position_embeddings",
            "use at least that",
        ),
        ({"data": {"data_path": "a", "split": "0,1"}}, "data.split", "leaves nothing to train on"),
        ({"model": {"openai_gelu": True, "swiglu": True}}, "model.openai_gelu", "switch one of the two off"),
        ({"optimizer": {"min_lr": 1.0}}, "optimizer.min_lr", "above lr"),
        ({"optimizer": {"lr_warmup_init": 0.5}}, "optimizer.lr_warmup_init", "0.5 is above lr 0.001"),
        ({"training": {"loss_scale": 64.0}}, "training.loss_scale", "switch fp16 on"),
        ({"training": {"loss_scale": 64.0, "bf16": True}}, "training.loss_scale", "switch fp16 on"),
        ({"optimizer": {"lr_warmup_iters": 20}}, "optimizer.lr_warmup_iters", "lower it"),
        ({"data": {"split": "-1,1,0"}}, "data.split", "non-negative"),
        ({"data": {"split": "90,abc5,5"}}, "data.split", "non-negative"),
        ({"data": {"mock_data": True, "data_path": "/a"}}, "data.mock_data", "cannot be combined with data.data_path"),
    ],
)
def test_refuses_with_key_and_remedy(sections: dict[str, dict[str, Any]], key: str, says: str) -> None:
    error = refusal(**sections)
    assert error.key == key
    assert says in error.problem


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}, "optimizer": {"lr": 1}})
    assert caught.value.key == "training"


def test_an_invalid_layout_is_refused_with_the_nearest_valid_ones() -> None:
    error = refusal(6, parallel={"tensor_model_parallel_size": 4})
    assert "TP 4 x PP 1 = 4 does not divide the world size 6" in error.problem
    assert "TP 2 x PP 1 x DP 3" in error.problem


def test_nearest_layouts_also_fit_the_batch() -> None:
    # DP 3 and DP 6 do not divide a batch of 4, so that only those with 3 or 6 stages are left.
    error = refusal(6, parallel={"tensor_model_parallel_size": 4}, training={"global_batch_size": 4})
    assert error.problem.endswith("TP 2 x PP 3 x DP 1; TP 1 x PP 3 x DP 2; TP 1 x PP 6 x DP 1")
    # With 2 layers there are at most 4 stages.
    shallow = {"num_layers": 2, "num_attention_heads": 4}
    error = refusal(6, parallel={"tensor_model_parallel_size": 4}, training={"global_batch_size": 1}, model=shallow)
    assert error.problem.endswith("TP 2 x PP 3 x DP 1")
    error = refusal(
        8,
        parallel={"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4},
        training={"global_batch_size": 3},
    )
    assert error.key == "training.global_batch_size"


def test_global_batch_that_does_not_divide() -> None:
    error = refusal(4, training={"global_batch_size": 7, "micro_batch_size": 2})
    assert error.key == "training.global_batch_size"
    assert "micro_batch_size 2 x DP 4 = 8; use 8" in error.problem


def test_unset_global_batch_fits_any_world() -> None:
    config = build_config(values(training={"micro_batch_size": 3}))
    for dp in (1, 2, 5, 8):
        check_world_size(config, dp)
        assert (config.global_batch_size(dp), config.num_micro_batches(dp)) == (3 * dp, 1)


def test_scientific_notation_without_a_dot_is_a_number() -> None:
    assert build_config(values(optimizer={"lr": "1e-4"})).optimizer.lr == 1e-4


def test_one_path_needs_no_list() -> None:
    assert build_config(values(data={"data_path": "/a/b"})).data.data_path == ["/a/b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 1\n- 2\n", "is a list, not a mapping"),
        ("model: {num_layers: 2\n", "is not valid YAML"),
        ("model: {num_layers: 2, num_layers: 3}\n", "'num_layers' occurs twice"),
        ("", "is empty, not a mapping"),
        ("1: {a: 2}\n", "is not a mapping"),
        ("!!python/object/apply:os.system ['true']\n", "is not valid YAML"),
    ],
)
def test_broken_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "llmctl.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(path)


def test_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "llmctl.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)


def test_padded_vocabulary_divides_over_ranks() -> None:
    model = build_config(values()).model
    assert model.padded_vocab_size(50257, 1) == 50304
    assert model.padded_vocab_size(50257, 8) % (128 * 8) == 0


def test_every_key_is_known_once() -> None:
    keys = known_keys()
    assert len(keys) == len(set(keys))
    names = [key.partition(".")[2] for key in keys if not key.startswith("job.")]
    assert len(names) == len(set(names)), "flags are key names without their section, so they must be unique"


def test_imports_no_torch() -> None:
    code = "import sys, trainer.config.train_config; assert 'torch' not in sys.modules and 'yaml' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)


def test_config_is_frozen() -> None:
    config: TrainConfig = build_config(values())
    with pytest.raises(ValueError, match="frozen"):
        config.model.num_layers = 5  # type: ignore[misc]


def test_numbers_need_rows_at_their_interval() -> None:
    assert build_config(values(logging={"log_interval": 4, "numbers_interval": 8})).logging.numbers_interval == 8
    said = refusal(logging={"log_interval": 4, "numbers_interval": 6})
    assert said.key == "logging.numbers_interval"
    assert "6 is not a multiple of logging.log_interval 4" in str(said)
