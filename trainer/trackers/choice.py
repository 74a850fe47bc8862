"""The trackers that a config asks for, checked before training. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from trainer.config.errors import ConfigError
from trainer.config.sections.logging import LoggingConfig
from trainer.hooks.user_function import load_function
from trainer.trackers.protocol import Tracker

_OWN_KEY = "logging.trackers"


@dataclass(frozen=True)
class Choice:
    """One tracker that the config asks for.

    Attributes:
        key: of the config, for messages.
        title: for messages.
        make: returns the tracker; called in its own thread, since it may import a large package.
    """

    key: str
    title: str
    make: Callable[[], Tracker]


def chosen_trackers(logging: LoggingConfig) -> list[Choice]:
    """The trackers of a config, none of which is made yet.

    Raises:
        ConfigError: a package is not installed, or a function of the user's own cannot be imported.
    """
    asked = logging.tracker_packages()
    missing = [(key, package) for key, module, package in asked if find_spec(module) is None]
    if missing:
        keys, packages = zip(*missing, strict=True)
        also = f" ({', '.join(keys[1:])} too)" if keys[1:] else ""
        words = " ".join(packages)
        raise ConfigError(
            keys[0], f"needs a package that is not installed{also}; pip install {words}, or set null to train without"
        )
    found = [
        Choice(key, _OF_PACKAGES[module][0], partial(_OF_PACKAGES[module][1], logging)) for key, module, _ in asked
    ]
    return [*found, *(Choice(_OWN_KEY, name, load_function(_OWN_KEY, name).function) for name in logging.trackers)]


def _tensorboard(logging: LoggingConfig) -> Tracker:
    from trainer.trackers.tensorboard_files import TensorBoardFiles

    return TensorBoardFiles(logging.tensorboard_dir or "", logging.tensorboard_queue_size)


def _wandb(logging: LoggingConfig) -> Tracker:
    from trainer.trackers.wandb_run import WandbRun

    return WandbRun(logging)


def _mlflow(logging: LoggingConfig) -> Tracker:
    from trainer.trackers.mlflow_run import MlflowRun

    return MlflowRun(logging)


_OF_PACKAGES: dict[str, tuple[str, Callable[[LoggingConfig], Tracker]]] = {
    "tensorboard": ("TensorBoard", _tensorboard),
    "wandb": ("Weights & Biases", _wandb),
    "mlflow": ("MLflow", _mlflow),
}
