"""Flags of Megatron-LM and Megatron-DeepSpeed that ask for a profile."""

import pytest

from llmctl.scripts.flag_group import FlagGroup
from llmctl.scripts.flag_meaning import read_flags
from trainer.config.sections.profile_steps import NO_PROFILE
from trainer.planning.command_line import UsageError, build_train_config, parse_command_line

STEPS = "logging.profile_steps"
NEEDED = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --vocab-size 9 --train-iters 30 --seq-length 8 --lr 1"
BOTH = "--profile --use-pytorch-profiler"


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (BOTH, [10, 11]),
        (f"{BOTH} --profile-step-start 5 --profile-step-end 9", [5, 8]),
        (f"{BOTH} --profile-step-start 0 --profile-step-end 3", [1, 2]),
        (f"{BOTH} --profile-steps 3 4", [3, 4]),
        ("--profile-steps 3 4", [3, 4]),
        ("--profile pt", [2, 3]),
        ("--profile pt-full --profile_steps 4,6", [4, 6]),
        ("--profile", None),
        ("--use-pytorch-profiler --profile-step-start 5", None),
    ],
)
def test_flags_become_the_first_and_the_last_step(flags, steps):
    line = parse_command_line(f"{NEEDED} {flags}".split())
    config = build_train_config(line).logging
    assert (config.profile_steps, config.profile_ranks) == (steps, [0])
    assert line.notes == ([] if steps else [f"{note} is without effect here: {NO_PROFILE}" for note in notes(flags)])


def notes(flags):
    return [f"--{flag.strip()}" for flag in f" {flags}".split(" --")[1:]]


def test_ranks_are_those_of_megatron():
    line = parse_command_line(f"{NEEDED} {BOTH} --profile-ranks 0 3".split())
    assert build_train_config(line).logging.profile_ranks == [0, 3]
    assert parse_command_line(["--profile-ranks", "1"]).notes == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{BOTH} --profile-step-end 10", "--profile-step-end: 10 is not valid: the profile ends before it; use 11"),
        (f"{BOTH} --profile-step-start x", "--profile-step-start: takes one whole number"),
        ("--profile nsys", "--profile: 'nsys' is not valid; give it alone, or use pt or pt-full"),
        ("--use-pytorch-profiler 1", "--use-pytorch-profiler: takes no value"),
        ("--profile-steps", "--profile-steps: takes one or more values"),
    ],
)
def test_wrong_flags_are_refused(flags, message):
    with pytest.raises(UsageError) as caught:
        parse_command_line(flags.split())
    assert str(caught.value).startswith(message)


def groups_of(flags):
    words = [one.split() for one in notes(flags)]
    return [FlagGroup(one[0][2:], tuple(one), line, None) for line, one in enumerate(words, 1)]


def test_a_script_tells_what_each_flag_sets():
    found = read_flags(groups_of(f"{BOTH} --profile-step-end 14"), lambda _: None)
    assert found.values == {STEPS: [10, 13]}
    assert STEPS in found.origins
    assert NO_PROFILE not in [reason for *_, reason in found.without_effect]
    found = read_flags(groups_of("--profile --profile-step-end 14"), lambda _: None)
    assert found.values == {}
    assert found.without_effect == [(1, "--profile", NO_PROFILE), (2, "--profile-step-end 14", NO_PROFILE)]
