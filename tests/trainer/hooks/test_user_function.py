"""Functions of the user's own: found, checked, and refused with one sentence."""

import pytest

from trainer.config.errors import ConfigError
from trainer.config.sections.hooks import HooksConfig
from trainer.hooks.chosen import Hooks
from trainer.planning.build_config import build_config

not_a_function = 1


def schedule(step, config):
    return 2.0 if config is None else step


def of_one(facts):
    return facts, 1.0


def of_any(*arguments):
    return float(len(arguments))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("no_such_module:make", "no_such_module cannot be imported (ModuleNotFoundError: No module named"),
        (f"{__name__}:nothing", f"{__name__} has no function nothing; name one that it has"),
        (f"{__name__}:not_a_function", "has no function not_a_function"),
        (f"{__name__}:of_one", "of_one is called as of_one(step, config), but has the parameters (facts)"),
    ],
)
def test_a_wrong_function_is_refused_before_training(place, said):
    with pytest.raises(ConfigError) as caught:
        Hooks.load(HooksConfig(lr_function=place))
    assert caught.value.key == "hooks.lr_function"
    assert said in str(caught.value)


def test_functions_that_can_be_called_are_taken():
    for name in ("schedule", "of_any"):
        assert Hooks.load(HooksConfig(lr_function=f"{__name__}:{name}")).learning_rate(0, None) == 2.0
    assert Hooks.load(HooksConfig()).learning_rate(0, None) is None


def config(hooks, **sections):
    values = {
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2},
        "training": {"train_iters": 2, "seq_length": 8},
        "optimizer": {"lr": 1.0},
    }
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    return build_config({**values, "hooks": hooks})


@pytest.mark.parametrize(
    ("hooks", "sections", "said"),
    [
        ({"after_step": "my_hooks"}, {}, "'my_hooks' is not MODULE:FUNCTION, such as my_package.my_module:my_function"),
        ({"metrics": ["os.path:a.b"]}, {}, "'os.path:a.b' is not MODULE:FUNCTION"),
        ({"metrics": ["one:loss", "two:loss"]}, {}, "two functions are called loss, which is the metric's name"),
        (
            {"lr_function": "my_hooks:schedule"},
            {"optimizer": {"lr_decay_style": "cosine"}},
            "hooks.lr_function: cannot be combined with optimizer.lr_decay_style, which is a schedule too",
        ),
        (
            {"loss_function": "my_hooks:loss"},
            {"model": {"z_loss_coeff": 1e-4}},
            "hooks.loss_function: cannot be combined with model.z_loss",
        ),
        (
            {"loss_function": "my_hooks:loss"},
            {"model": {"mtp_num_layers": 1, "position_embedding_type": "rope"}},
            "hooks.loss_function: cannot be combined with model.mtp",
        ),
    ],
)
def test_what_the_config_alone_shows_is_refused_before_the_queue(hooks, sections, said):
    with pytest.raises(ConfigError) as caught:
        config(hooks, **sections)
    assert said in str(caught.value)


def test_no_user_code_runs_before_the_job():
    assert config({"lr_function": "no_such_module:schedule"}).hooks.lr_function == "no_such_module:schedule"
