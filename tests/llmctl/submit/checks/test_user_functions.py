"""Functions of job.code that a config names: looked up in the text of the files, before anything is queued."""

import pytest

from llmctl.cli.main import main
from llmctl.submit.checks.user_functions import function_problems
from trainer.planning.build_config import build_config

HOOKS = """\
import os
from functools import partial

raise SystemExit("this file must not be run")


def loss(logits, labels, config):
    return logits


def rate(step, config, *, scale):
    return scale


def facts_of(facts, more=1):
    return None


def any_number(*arguments):
    return None


if os.environ.get("OTHER"):

    def either(one):
        return one

else:

    def either(logits, labels, config):
        return logits


@partial
def decorated():
    return None


made = partial(loss)


class Letters:
    pass
"""


def problems(tmp_path, hooks, *, text=HOOKS, names=("hooks.py",), **sections):
    """Keys and texts of the problems of a config with these hooks."""
    (tmp_path / "file").write_text(text)
    values = {
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2},
        "training": {"train_iters": 2, "seq_length": 8},
        "optimizer": {"lr": 1.0},
        "hooks": hooks,
        **sections,
    }
    files = {name: tmp_path / "file" for name in names}
    return [(problem.key, problem.text) for problem in function_problems(build_config(values), files)]


@pytest.mark.parametrize("name", ["loss", "any_number", "either", "decorated", "made", "Letters", "partial"])
def test_what_may_be_right_is_left_to_the_job(tmp_path, name):
    assert problems(tmp_path, {"loss_function": f"hooks:{name}"}) == []


@pytest.mark.parametrize("place", ["installed:loss", "installed.part:loss"])
def test_a_module_of_another_place_is_left_to_the_job(tmp_path, place):
    assert problems(tmp_path, {"loss_function": place}) == []


@pytest.mark.parametrize("text", ["from other import *", "def __getattr__(name): ...", "globals()['x'] = 1"])
def test_a_module_that_may_have_any_name_is_left_to_the_job(tmp_path, text):
    assert problems(tmp_path, {"loss_function": "hooks:x"}, text=text) == []


def test_all_problems_are_found(tmp_path):
    found = problems(
        tmp_path,
        {"loss_function": "hooks:facts_of", "lr_function": "hooks:rate", "metrics": ["hooks:none", "hooks.part:x"]},
        logging={"trackers": ["hooks:loss"]},
    )
    file = tmp_path / "file"
    assert found == [
        ("logging.trackers", "hooks:loss: is called as loss(), but has the parameters (logits, labels, config)"),
        (
            "hooks.loss_function",
            "hooks:facts_of: is called as facts_of(logits, labels, config), but has the parameters (facts, more=1)",
        ),
        (
            "hooks.lr_function",
            "hooks:rate: is called as rate(step, config), but has the parameters (step, config, *, scale)",
        ),
        ("hooks.metrics", f"hooks:none: {file} has no function none; name one that it has"),
        ("hooks.metrics", "hooks.part:x: job.code has hooks, but no module hooks.part; name one that it has"),
    ]


def test_a_module_of_a_package_that_is_not_python_is_named_with_its_line(tmp_path):
    names = ("my/__init__.py", "my/hooks.py")
    (found,) = problems(tmp_path, {"lr_function": "my.hooks:rate"}, text="x = 1\ndef rate(:\n", names=names)
    assert found == (
        "hooks.lr_function",
        f"my.hooks:rate: {tmp_path / 'file'}, line 2 is not valid Python: invalid syntax",
    )
    assert problems(tmp_path, {"lr_function": "my.hooks:rate"}, names=names)[0][0] == "hooks.lr_function"


def test_submit_refuses_them_beside_other_problems(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    words = ["submit", "--example", "--dry-run", "--cluster", "local", "--set", "job.code=."]
    lost = ["--set", "hooks.loss_function=my_hooks:lost", "--set", "parallel.tensor_model_parallel_size=2"]
    assert main([*words, *lost]) == 2
    said = capsys.readouterr().err
    assert (
        f"--set hooks.loss_function: my_hooks:lost: {tmp_path}/my_hooks.py has no function lost; name one that it has"
        in said
    )
    assert "parallel.tensor_model_parallel_size" in said
    assert main([*words, "--set", "hooks.loss_function=my_hooks:loss"]) == 0
