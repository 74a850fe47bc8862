"""Flags of Megatron-DeepSpeed and of other forks of Megatron-LM."""

import math

import pytest

from trainer.config.forks.ignored import expert_flags, fork_ignored
from trainer.config.forks.refused import REFUSED, fork_refused
from trainer.planning.build_config import megatron_flag_problem
from trainer.planning.command_line import UsageError, build_train_config, parse_command_line

_TEXT = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --vocab-size 128
--mock-data --lr 1e-4 --train-iters 2 --micro-batch-size 1 --global-batch-size 4
"""
MODEL = _TEXT.split()


def config_of(*flags):
    return build_train_config(parse_command_line([*MODEL, *flags]))


def test_sequence_parallelism_of_deepspeed_is_context_parallelism_by_all_to_all():
    parallel = config_of("--ds-sequence-parallel-size", "2").parallel
    assert (parallel.context_parallel_size, parallel.cp_comm_type) == (2, "a2a")
    alone = config_of("--ds-sequence-parallel-size=1").parallel
    assert alone.context_parallel_size == 1
    kept = config_of("--ds-sequence-parallel-size", "2", "--cp-comm-type", "p2p").parallel
    assert kept.cp_comm_type == "p2p"


def test_other_names_of_keys_and_of_values():
    config = config_of("--num-key-value-heads", "2", "--rotary-position-embeddings-theta", "5e5", "--cpu-optimizer")
    assert config.model.num_query_groups == 2
    assert config.model.rotary_base == 5e5
    assert config.optimizer.optimizer_cpu_offload
    assert config_of("--normalization", "rmsnorm").model.normalization == "RMSNorm"
    assert config_of("--normalization", "rmsnorm", "--normalization", "layernorm").model.normalization == "LayerNorm"
    assert config_of("--position-embedding-type", "rotary").model.position_embedding_type == "rope"
    assert config_of("--position-embedding-type", "alibi").model.position_embedding_type == "alibi"
    values = parse_command_line(["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", "t5-small"]).values
    assert values == {"data.tokenizer_type": "HuggingFaceTokenizer", "data.tokenizer_model": "t5-small"}
    assert config_of("--z-loss-strength", "1e-4").model.z_loss_coeff == 1e-4
    assert config_of("--embed-layernorm").model.embedding_layer_norm
    for flag in ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-lr-scheduler"):
        assert config_of(flag).optimizer.use_checkpoint_opt_param_scheduler


@pytest.mark.parametrize("flags", [["--use-embedding-scaling", *MODEL], [*MODEL, "--use-embedding-scaling"]])
def test_scaled_embeddings_follow_the_hidden_size(flags):
    assert build_train_config(parse_command_line(flags)).model.embedding_scale == math.sqrt(64)


def test_gated_layers_of_bigscience_are_four_times_as_wide_as_the_model():
    model = config_of("--glu-activation", "geglu").model
    assert (model.activation, model.is_gated, model.ffn_size) == ("gelu", True, 4 * 64)
    assert config_of("--glu-activation", "swiglu", "--ffn-hidden-size", "96").model.ffn_size == 96
    with pytest.raises(UsageError, match="--glu-activation: 'liglu' is not valid; use geglu or reglu or swiglu"):
        config_of("--glu-activation", "liglu")


def test_a_vocabulary_is_padded_to_a_number_of_rows():
    model = config_of("--pad-vocab-size-to", "250880", "--make-vocab-size-divisible-by", "128").model
    assert model.padded_vocab_size(model.vocab_size, 4) == 250880


def test_a_conversion_is_not_a_training():
    with pytest.raises(UsageError, match="converts a checkpoint and trains nothing; use llmctl checkpoint"):
        config_of("--ckpt-convert-format", "torch")


def test_scaled_embeddings_need_the_hidden_size():
    with pytest.raises(UsageError, match="--use-embedding-scaling: is the square root of --hidden-size; give both"):
        parse_command_line(["--use-embedding-scaling"])
    with pytest.raises(UsageError, match="--use-embedding-scaling: takes no value; remove 'true'"):
        parse_command_line(["--hidden-size", "64", "--use-embedding-scaling", "true"])
    assert "model.embedding_scale with the square root" in megatron_flag_problem("use_embedding_scaling", [])


def test_a_single_expert_of_deepspeed_means_none():
    flags = ["--num-experts", "1", "--moe-expert-parallel-size", "1", "--moe-loss-coeff", "0.01"]
    line = parse_command_line([*MODEL, *flags])
    assert build_train_config(line).model.num_experts is None
    assert any(note.startswith("--num-experts 1 is without effect here") for note in line.notes)
    # A flag of Megatron-LM, where a single expert is one.
    assert config_of("--num-experts", "1", "--moe-router-topk", "1", "--moe-router-pre-softmax").model.num_experts == 1


@pytest.mark.parametrize("flag", sorted(expert_flags()))
def test_experts_that_deepspeed_routes_are_refused(flag):
    value = ["2"] * fork_ignored()[flag][1]
    parse_command_line([f"--{flag}", *value])
    with pytest.raises(UsageError, match=f"--{flag}: experts of Megatron-DeepSpeed are routed by DeepSpeed's rules"):
        parse_command_line(["--num-experts", "64", f"--{flag}", *value])


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--pp-partition-method", "uniform"], "'uniform' is not available here; use --pipeline-model-parallel-layout"),
        (["--DDP-impl", "FSDP"], "'FSDP' is not available here; use --data-parallel-sharding-strategy"),
        (["--encoder-pipeline-model-parallel-size", "2"], "encoder and decoder are on the same ranks"),
        (["--kd"], "is a flag of Megatron-DeepSpeed; distillation"),
        (["--xielu"], "is a flag of swiss-ai's Megatron-LM; this activation"),
        (["--train-range-to-skip", "1", "2"], "is a flag of Argonne's Megatron-DeepSpeed; use --iterations-to-skip"),
    ],
)
def test_what_would_train_something_else_is_refused(flags, match):
    with pytest.raises(UsageError, match=match):
        parse_command_line(flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--pp-partition-method", "type:transformer|embedding"],
        ["--DDP-impl", "local"],
        ["--encoder-tensor-model-parallel-size", "0"],
        ["--apply-query-key-layer-scaling"],
        ["--no-load-lr-state"],
        ["--use-checkpoint-args"],
        ["--use-mp-args-from-checkpoint-args"],
        ["--zero-allgather-bucket-size", "5e8"],
    ],
)
def test_what_changes_no_result_is_told(flags):
    line = parse_command_line(flags)
    assert line.values == {}
    assert [note.partition(" is without effect")[0] for note in line.notes] == [" ".join(flags)]


def test_each_sentence_is_one_and_no_flag_has_two_answers():
    names = [name for _, names in REFUSED for name in names.split()]
    assert len(names) == len(set(names))
    assert not fork_refused().keys() & fork_ignored().keys()
    assert all("\n" not in sentence and not sentence.endswith(".") for sentence in fork_refused().values())


def test_weighted_splits_of_bigscience_are_one_split_or_datasets_for_each():
    flags = ["--train-weighted-split-paths", "T: 0.3 0:0.9 a, 0.7 0:0.9 b"]
    flags += ["--valid-weighted-split-paths", "V: 0.3 0.9:0.95 a, 0.7 0.9:0.95 b"]
    flags += ["--test-weighted-split-paths", "E: 0.3 0.95:1 a, 0.7 0.95:1 b"]
    data = parse_command_line(flags).values
    assert data == {"data.data_path": ["0.3", "a", "0.7", "b"], "data.split": "0.9,0.05,0.05"}
    two = ["--train-weighted-split-paths", "T: 1 0:0.9 a", "--valid-weighted-split-paths", "V: 1 0.9:1.0 a"]
    assert parse_command_line(two).values == {"data.data_path": ["a"], "data.split": "0.9,0.1,0.0"}
    whole = ["--train-weighted-split-paths", "T: 1 0:1 a, 2 0:1.0 b", "--valid-weighted-split-paths", "V: 1 0:1 c"]
    assert parse_command_line(whole).values == {
        "data.train_data_path": ["1", "a", "2", "b"],
        "data.valid_data_path": ["c"],
    }


@pytest.mark.parametrize(
    ("train", "valid", "message"),
    [
        (["T: 1 0:0.9 a"], ["V: 1 0.9:1 b"], "ranges that are not those of one --split"),
        (["T: 1 0:0.9 a"], ["V: 1 0.8:1 a"], "ranges that are not those of one --split"),
        (["T: 1 0:0.9 a"], ["V: 1 0.9:0.95 a"], "ranges that are not those of one --split"),
        (["T: 1 0:0.9 a, 1 0:0.8 b"], ["V: 1 0.9:1 a, 1 0.8:1 b"], "ranges that are not those of one --split"),
        (["T: 1 0:1 a"], ["V: 1 0:1 b", "W: 1 0:1 c"], "takes one group in quotes"),
        (["T: 1 0:1"], ["V: 1 0:1 b"], "'1 0:1' is not WEIGHT START:END PATH"),
        (["T: 1 0.5:0.5 a"], ["V: 1 0:1 b"], "'1 0.5:0.5 a' is not WEIGHT START:END PATH"),
        (["T: x 0:1 a"], ["V: 1 0:1 b"], "'x 0:1 a' is not WEIGHT START:END PATH"),
        (["T: inf 0:1 a"], ["V: 1 0:1 b"], "'inf 0:1 a' is not WEIGHT START:END PATH"),
        (["T: 1 0:nan a"], ["V: 1 0:1 b"], "'1 0:nan a' is not WEIGHT START:END PATH"),
        (["T: 1 0-1 a"], ["V: 1 0:1 b"], "'1 0-1 a' is not WEIGHT START:END PATH"),
    ],
)
def test_other_weighted_splits_are_refused(train, valid, message):
    with pytest.raises(UsageError, match=message):
        parse_command_line(["--train-weighted-split-paths", *train, "--valid-weighted-split-paths", *valid])


def test_what_trains_nothing_names_the_command_that_evaluates():
    with pytest.raises(UsageError, match="--no-train: .*it trains nothing; use llmctl evaluate"):
        parse_command_line(["--no-train", "1"])
    with pytest.raises(UsageError, match="use --iterations-to-skip"):
        parse_command_line(["--skip-train-iteration-range", "1-2", "5-6"])
