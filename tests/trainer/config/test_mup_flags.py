"""Flags of maximal update parametrization, of Megatron-LM and of bigscience's Megatron-DeepSpeed."""

import math

import pytest

from tests.trainer.config.test_fork_flags import config_of
from trainer.config.errors import ConfigError
from trainer.config.sections.scales import logits_divisor, matrix_std, score_scale, width_ratio
from trainer.planning.command_line import UsageError, parse_command_line

MEGATRON = ["--use-mup", "--mup-base-hidden-size", "16"]
FORK = ["--mup", "--mup-base-hidden-size", "16"]
"""Of a model with hidden_size 64 and 4 heads."""


def factors(*flags):
    model = config_of(*flags).model
    return width_ratio(model), model.embedding_scale or 1.0, score_scale(model), 1 / logits_divisor(model)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (1, 1, 0.25, 1)),
        (MEGATRON, (4, 1, 1 / 16, 1 / 4)),
        # Megatron-LM: the width of the model itself; only the scores change.
        (["--use-mup"], (1, 1, 1 / 16, 1)),
        ([*MEGATRON, "--mup-embedding-mult", "12", "--mup-output-mult", "0.5"], (4, 12, 1 / 16, 0.5)),
        # There a factor of 1 stands for the ratio of the widths.
        ([*MEGATRON, "--mup-output-mult", "1.0", "--mup-width-mult", "7"], (4, 1, 1 / 16, 1 / 4)),
        ([*MEGATRON, "--mup-attn-scale-power", "0.5"], (4, 1, 1 / 4, 1 / 4)),
        ([*MEGATRON, "--mup-base-head-dim", "64"], (4, 1, 8 / 16, 1 / 4)),
        ([*MEGATRON, "--kv-channels", "32", "--mup-base-head-dim", "9"], (4, 1, 3 / 32, 1 / 4)),
        ([*MEGATRON, "--softmax-scale", "0.3", "--mup-attn-scale-power", "0.5"], (4, 1, 0.3, 1 / 4)),
        (FORK, (4, 1, 1 / 16, 1 / 4)),
        ([*FORK, "--mup-input-mult", "10", "--mup-output-mult", "4", "--mup-attn-mult", "3"], (4, 10, 3 / 16, 1)),
    ],
)
def test_factors(flags, expected):
    assert factors(*flags) == pytest.approx(expected)


def test_initial_values():
    assert matrix_std(config_of(*MEGATRON, "--init-method-std", "0.1").model) == pytest.approx(0.1 / math.sqrt(4))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mup"], "--mup: the width of the base model is not in the flags; give --mup-base-hidden-size"),
        (["--mup", "--use-mup"], "--mup: is another program's --use-mup; leave one of them out"),
        ([*MEGATRON, "--mup-attn-mult", "2"], "--mup-attn-mult: does not belong to --use-mup; leave one of them out"),
        ([*FORK, "--mup-embedding-mult", "2"], "--mup-embedding-mult: does not belong to --mup; leave one of them out"),
        (["--use-mup", "--mup-base-hidden-size", "0"], "--mup-base-hidden-size: '0' is not valid"),
        (["--use-mup", "--mup-base-hidden-size", "2.5"], "--mup-base-hidden-size: '2.5' is not valid"),
        ([*MEGATRON, "--mup-output-mult", "0"], "--mup-output-mult: '0' is not a number above 0"),
        ([*MEGATRON, "--mup-output-mult", "nan"], "--mup-output-mult: 'nan' is not a number above 0"),
        ([*MEGATRON, "--mup-attn-scale-power", "-1"], "--mup-attn-scale-power: '-1' is not a number above 0"),
        (["--use-mup", "--mup-base-hidden-size", "9" * 5000], "--mup-base-hidden-size: '9999"),
        ([*MEGATRON, "--mup-attn-scale-power", "1e308"], "model.softmax_scale: 0.0 is not valid"),
        ([*MEGATRON, "--mup-output-mult", "1e-320"], "model.logits_scaling: inf is not valid"),
        (["--use-mup", "yes"], "--use-mup: takes no value, not 1"),
        (
            [*MEGATRON, "--mup-embedding-mult", "2", "--embedding-scale", "3"],
            "--embedding-scale: is also set by a flag of mup; give one of them",
        ),
    ],
)
def test_refused(flags, message):
    with pytest.raises((UsageError, ConfigError)) as told:
        config_of(*flags)
    assert str(told.value).startswith(message)


def test_sizes_must_stand_beside_the_flag():
    for flags in (["--use-mup"], ["--use-mup", "--hidden-size", "64", "--mup-base-head-dim", "8"]):
        with pytest.raises(UsageError, match=r"^--use-mup: needs --(hidden-size|num-attention-heads) beside it"):
            parse_command_line(flags)


def test_flags_that_change_nothing_are_told():
    sizes = ["--hidden-size", "64", "--num-attention-heads", "4", *FORK]
    told = parse_command_line([*sizes, "--mup-input-mult", "1", "--mup-output-mult", "1", "--mup-attn-mult", "1"]).notes
    assert [note.partition(" is without")[0] for note in told] == [
        f"--mup-{name}-mult 1" for name in ("input", "output", "attn")
    ]
    (told,) = parse_command_line([*sizes, "--mup-attn-mult", "3", "--softmax-scale", "0.1"]).notes
    assert told.endswith("--softmax-scale is used instead")


def test_flags_without_the_switch_are_told():
    told = parse_command_line(["--mup-base-hidden-size", "16", "--mup-output-mult", "2"])
    assert not told.values
    assert all("Megatron-LM reads the flag only beside --use-mup" in note for note in told.notes)
    assert len(told.notes) == 2


def test_latent_attention_needs_a_scale_of_its_own():
    latent = ["--multi-latent-attention", "--kv-lora-rank", "32", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8"]
    latent += ["--v-head-dim", "16", "--position-embedding-type", "rope", *MEGATRON]
    with pytest.raises(ConfigError, match=r"^model.softmax_scale: is unset, but mup_base_hidden_size gives"):
        config_of(*latent)
    assert width_ratio(config_of(*latent, "--softmax-scale", "0.2").model) == 4
