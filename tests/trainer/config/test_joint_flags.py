"""Flags of Megatron-LM whose meaning follows from several of them: yarn, quick GeLU, layers with a window."""

import math

import pytest
import torch

from tests.trainer.config.test_fork_flags import config_of
from trainer.config.joint.flags import JOINT_FLAGS
from trainer.config.sections.training import TrainingConfig
from trainer.planning.build_config import megatron_flag_problem
from trainer.planning.command_line import UsageError, parse_command_line
from trainer.planning.rope import RopeScaling
from trainer.process.device import choose_device
from trainer.process.launch_environment import resolve_launch_environment

YARN = ["--position-embedding-type", "yarn"]
LATENT = [*["--multi-latent-attention", "--kv-lora-rank", "32", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8"]]
LATENT += [*["--v-head-dim", "16", "--position-embedding-type", "rope"]]
GPT_OSS = ["--quick-geglu", "--glu-linear-offset", "1.0", "--activation-func-clamp-value", "7.0"]


def scaling_of(*flags):
    return RopeScaling.of(config_of(*flags).model)


def test_the_activation_of_gpt_oss():
    model = config_of(*GPT_OSS).model
    assert (model.activation, model.is_gated, model.activation_alpha, model.activation_clamp) == (
        "silu",
        True,
        1.702,
        7,
    )
    # Megatron-LM narrows the layers with --swiglu alone.
    assert model.ffn_size == 4 * 64


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quick-geglu"], "--quick-geglu: quick GeLU without --glu-linear-offset 1"),
        (["--quick-geglu", "--glu-linear-offset", "0.5"], "--quick-geglu: quick GeLU without --glu-linear-offset 1"),
        ([*GPT_OSS, "--swiglu"], "--quick-geglu: cannot be combined with --swiglu"),
        (["--swiglu", "--glu-linear-offset", "1"], "--glu-linear-offset: is for --quick-geglu"),
        (["--glu-linear-offset", "one"], "--glu-linear-offset: 'one' is not a number"),
        ([*YARN, "--rotary-scaling-factor", "inf"], "--rotary-scaling-factor: 'inf' is not a number"),
        ([*YARN, "--yarn-beta-fast", "nan"], "--yarn-beta-fast: 'nan' is not a number"),
        (
            [*YARN, "--yarn-original-max-position-embeddings", "10.7"],
            "--yarn-original-max-position-embeddings: 10.7 is not a whole number",
        ),
        (["--window-size", "7,0", "--window-attn-skip-freq", "inf"], "--window-attn-skip-freq: 'inf' is not a number"),
        (["--window-size", "7,0", "--window-attn-skip-freq", "2.5"], "--window-attn-skip-freq: takes a whole number"),
        (["--quick-geglu", "yes"], "--quick-geglu: takes no value, not 1"),
        (["--mscale"], "--mscale: takes one value, not 0"),
        (["--rope-type", "yarn"], "--rope-type: yarn is for --multi-latent-attention"),
        (["--rope-type", "llama"], "--rope-type: 'llama' is not valid; use rope or yarn"),
        ([*YARN, "--rotary-percent", "0.5"], "--rotary-percent: yarn of Megatron-LM rotates all channels"),
        ([*YARN, "--rope-scaling", "rope_type=yarn", "factor=2"], "--rope-scaling: has the numbers of yarn too"),
        (
            [*LATENT, *["--rope-type", "rope", "--rotary-scaling-factor", "40", "--mscale-all-dim", "1"]],
            "--mscale-all-dim: Megatron-LM scales scores by it even with --rope-type rope",
        ),
        (["--window-size", "all,0"], "--window-size: 'all,0' is not valid"),
        (["--window-size", "7,0", "--window-attn-skip-freq", "0"], "--window-attn-skip-freq: takes a whole number"),
        (["--softmax-type", "off-by-one"], "--softmax-type: 'off-by-one' is not valid; use vanilla or learnable"),
    ],
)
def test_what_megatron_means_differently_is_refused(flags, message):
    with pytest.raises(UsageError, match=message):
        config_of(*flags)


def test_yarn_with_the_numbers_of_megatron():
    assert config_of(*YARN).model.position_embedding_type == "rope"
    found = scaling_of(*YARN)
    assert (found.rope_type, found.factor, found.original_max_position_embeddings) == ("yarn", 1, 4096)
    assert (found.beta_fast, found.beta_slow, found.truncate, found.amplitude) == (32, 1, True, 1)
    numbers = "--rotary-scaling-factor 32 --yarn-original-max-position-embeddings 8192 --yarn-beta-fast 16"
    found = scaling_of(*YARN, *numbers.split(), "--yarn-beta-slow", "2", "--no-yarn-correction-range-round-to-int")
    assert (found.factor, found.original_max_position_embeddings) == (32, 8192)
    assert (found.beta_fast, found.beta_slow, found.truncate) == (16, 2, False)
    assert found.amplitude == pytest.approx(0.1 * math.log(32) + 1)


@pytest.mark.parametrize(("mscale", "all_dim"), [(1.0, 0.0), (0.7, 0.0), (0.7, 1.0), (0.0, 1.0), (0.0, 0.0)])
def test_cosines_have_the_factor_of_megatron(mscale, all_dim):
    """megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py, _yarn_get_concentration_factor."""

    def magnitude(weight):
        return 0.1 * weight * math.log(40) + 1

    numbers = ["--rotary-scaling-factor", "40", "--mscale", str(mscale), "--mscale-all-dim", str(all_dim)]
    for flags in (YARN, LATENT):
        found = scaling_of(*flags, *numbers)
        assert found.amplitude == pytest.approx(magnitude(mscale) / magnitude(all_dim))
        assert found.score_factor == pytest.approx(magnitude(all_dim) ** 2)


def test_latent_attention_has_yarn_unless_told_otherwise():
    found = scaling_of(*LATENT, "--rotary-scaling-factor", "40", "--yarn-beta-fast", "8")
    assert (found.rope_type, found.factor, found.beta_fast) == ("yarn", 40, 32)
    assert scaling_of(*LATENT, "--rope-type", "yarn", "--rotary-scaling-factor", "40") == found
    # A factor of 1, which is Megatron-LM's default, changes no angle.
    assert config_of(*LATENT, "--rope-type", "yarn").model.rope_scaling is None
    assert config_of(*LATENT, "--rope-type", "rope", "--rotary-scaling-factor", "40").model.rope_scaling is None


def test_flags_of_yarn_without_yarn_are_told():
    line = parse_command_line(
        ["--position-embedding-type", "rope", "--rope-type", "rope", "--mscale", "1", "--glu-linear-offset", "0"]
    )
    assert line.values == {"model.position_embedding_type": "rope"}
    assert [note.partition(" is without effect")[0] for note in line.notes] == [
        "--mscale 1",
        "--rope-type rope",
        "--glu-linear-offset 0",
    ]


def test_windows_of_megatron():
    def windows(*flags):
        model = config_of("--num-layers", "4", *flags).model
        return [model.window_of(layer) for layer in range(4)]

    # Seven tokens and the query's own; every second layer sees all.
    assert windows("--window-size", "7,0", "--window-attn-skip-freq", "2") == [8, None, 8, None]
    assert windows("--window-size", "(7,0)") == [8] * 4
    assert windows("--window-size", "7,0", "--window-attn-skip-freq", "([1]*3+[0])") == [8, 8, 8, None]
    assert windows("--window-size", "8") == [8] * 4
    assert windows("--window-attn-skip-freq", "2") == [None] * 4


def test_sinks_by_the_name_of_the_softmax():
    assert config_of("--softmax-type", "learnable").model.attention_sinks
    assert not config_of("--softmax-type", "vanilla").model.attention_sinks


def test_a_key_named_like_such_a_flag_gets_the_keys_name():
    for flag, keys in JOINT_FLAGS.items():
        assert megatron_flag_problem(flag, []) == f"is Megatron-LM's --{flag}; use {keys[0]}"


@pytest.mark.parametrize("flag", ["exit-interval", "exit-duration-in-mins", "save-interval", "num-experts"])
def test_0_is_unset_as_in_megatron(flag):
    (value,) = parse_command_line([f"--{flag}", "0"]).values.values()
    assert value is None


def test_sums_of_bf16_products_in_float32():
    matmul = torch.backends.cuda.matmul
    launch = resolve_launch_environment({})
    for asked in (False, True):
        matmul.allow_bf16_reduced_precision_reduction = True
        try:
            config = TrainingConfig(
                train_iters=1, seq_length=8, device="cpu", disable_bf16_reduced_precision_matmul=asked
            )
            choose_device(config, launch)
            assert matmul.allow_bf16_reduced_precision_reduction != asked
        finally:
            matmul.allow_bf16_reduced_precision_reduction = True
