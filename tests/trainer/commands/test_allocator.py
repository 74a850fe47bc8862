"""Settings of torch's allocator before training starts."""

import pytest

from trainer.commands import pretrain
from trainer.process.launch_environment import LaunchEnvironment
from trainer.training import pretraining

GROWS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
SHAPE = ("--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "8")
FLAGS = (*SHAPE, "--mock-data", "--train-iters", "1", "--lr", "1e-3")


@pytest.fixture
def environment_of(monkeypatch):
    """Returns the environment in which training starts, from a device and the user's environment."""

    def start(device, given):
        monkeypatch.setattr(pretraining, "run_pretraining", lambda *_: 0)
        environment = dict(given)
        launch = LaunchEnvironment()
        assert pretrain.main([*FLAGS, "--device", device], launch, None, environment) == 0
        return {name: value for name, value in environment.items() if "ALLOC_CONF" in name}

    return start


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cuda", {}, GROWS),
        ("cpu", {}, {}),
        *(
            ("cuda", {name: "max_split_size_mb:512"}, {name: "max_split_size_mb:512"})
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        ),
    ],
)
def test_segments_grow_on_a_gpu_unless_the_user_sets_the_allocator(environment_of, device, given, expected):
    assert environment_of(device, given) == expected


def test_the_driver_decides_if_the_config_does_not(tmp_path):
    config = pretrain.build_train_config(pretrain.parse_command_line([*FLAGS]))
    control = tmp_path / "nvidiactl"
    assert pretrain.allocator_defaults(config, LaunchEnvironment(), {}, control) == {}
    control.touch()
    assert pretrain.allocator_defaults(config, LaunchEnvironment(), {}, control) == GROWS
    assert pretrain.allocator_defaults(config, LaunchEnvironment(gpus_per_node=0), {}, control) == {}
