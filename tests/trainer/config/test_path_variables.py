"""Variables of the environment in paths of a config."""

import pytest

from tests.trainer.config.test_fork_flags import MODEL
from trainer.config.errors import ConfigError
from trainer.config.paths.variables import (
    WITH_VARIABLES,
    check_no_variables,
    names_in,
    replace_variables,
    unset_problem,
)
from trainer.planning.build_config import known_keys
from trainer.planning.command_line import build_train_config, parse_command_line

ENVIRONMENT = {"SCRATCH": "/scratch/u", "USER": "u", "BLEND": "0.3 /a 0.7 /b", "EMPTY": "", "HF_TOKEN": "s3cret"}


def test_every_key_is_one_of_the_config():
    assert {*known_keys(), "model.from"} >= WITH_VARIABLES


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("$SCRATCH/ck", "/scratch/u/ck"),
        ("${SCRATCH}/ck", "/scratch/u/ck"),
        ("/data/$USER/${USER}x", "/data/u/ux"),
        ("/data/$(id)/a$/$1", "/data/$(id)/a$/$1"),
        ("~/ck", "~/ck"),
        ("file://$SCRATCH/mlruns", "file:///scratch/u/mlruns"),
    ],
)
def test_a_path_with_variables(path, shown):
    for section, key in (("checkpoint", "save"), ("logging", "mlflow_tracking_uri")):
        assert replace_variables({section: {key: path}}, ENVIRONMENT) == {section: {key: shown}}


def test_lists_and_other_keys():
    values = {
        "data": {"data_path": ["0.5", "$SCRATCH/a", 0.5, "/b"], "split": "$USER"},
        "job": {"mounts": ["$SCRATCH:/data"], "env": {"A": "$USER"}},
        "checkpoint": None,
    }
    before = repr(values)
    assert replace_variables(values, ENVIRONMENT) == {
        "data": {"data_path": ["0.5", "/scratch/u/a", 0.5, "/b"], "split": "$USER"},
        "job": {"mounts": ["/scratch/u:/data"], "env": {"A": "$USER"}},
        "checkpoint": None,
    }
    assert repr(values) == before


def test_all_unset_variables_are_told_at_once():
    values = {"checkpoint": {"save": "$NO/$EMPTY", "load": "${a.b}/x"}, "data": {"vocab_file": "/v/$HF_TOKEN"}}
    replaced = replace_variables(values, ENVIRONMENT)
    assert replaced == values
    with pytest.raises(ConfigError) as caught:
        check_no_variables(replaced)
    assert str(caught.value).splitlines() == [
        "checkpoint.load: ${a.b} is not a variable of the environment; write $NAME or ${NAME}",
        "also: checkpoint.save: $NO and $EMPTY are not set on this machine; export it there, or give the path itself",
        "also: data.vocab_file: $HF_TOKEN may be a secret, which no path may show; give the path itself",
    ]
    assert "s3cret" not in str(caught.value)


def test_a_trainer_that_is_started_by_hand_reads_its_own_environment():
    flags = [flag for flag in MODEL if flag != "--mock-data"] + ["--save", "$SCRATCH/ck", "--data-path", "$BLEND"]
    config = build_train_config(parse_command_line(flags), ENVIRONMENT)
    assert (config.checkpoint.save, config.data.data_path) == ("/scratch/u/ck", ["0.3", "/a", "0.7", "/b"])
    with pytest.raises(ConfigError, match=r"checkpoint.save: \$SCRATCH is not set on this machine"):
        build_train_config(parse_command_line(flags), {})
    assert build_train_config(parse_command_line(flags)).checkpoint.save == "$SCRATCH/ck"  # as llmctl wrote it


def test_one_and_several_names():
    assert names_in(["$A/${B}/$A", "0.5", 3]) == ["A", "B"]
    assert unset_problem(["A"], "login1").startswith("$A is not set on login1")
