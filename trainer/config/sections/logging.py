"""Section ``logging``: logging, metrics and trackers."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from trainer.config.errors import ConfigError
from trainer.config.sections.functions import check_functions
from trainer.config.sections.profile_steps import first_and_last
from trainer.config.sections.section import Section


class LoggingConfig(Section):
    """Logging and metrics."""

    log_interval: PositiveInt | None = None
    """Iterations per log line and row of metrics.jsonl. Unset: a row per iteration, and after the first five lines at
    most one line per 10 s. The last iteration of a run is always logged."""
    peak_tflops: PositiveFloat | None = None
    """Peak speed of one device in TFLOP/s, for MFU. Unset: looked up for the GPU; unknown GPUs report no MFU."""
    log_params_norm: bool = False
    """Rows have ``params_norm``, the norm of all parameters: of the float32 masters where weights have 16 bits."""
    log_num_zeros_in_grad: bool = False
    """Rows have ``num_zeros_in_grad``, the number of elements of the gradient that are exactly 0."""
    log_layer_norms: bool = False
    """Rows have ``layer_params_norms`` and ``layer_grad_norms``, the norms of parameters and gradient of each layer."""
    moe_per_layer_logging: bool = False
    """Rows have ``moe_layers``: of each layer with experts the auxiliary losses and the load of the experts."""
    log_memory: bool = False
    """Rows have ``memory_allocated_bytes`` and, on GPUs, ``memory_reserved_bytes`` and ``device_memory_used_bytes``."""
    log_batch_size: bool = False
    """Rows have ``batch_size``, the samples of a global batch."""
    log_world_size: bool = False
    """Rows have ``world_size``, the number of ranks."""
    numbers_interval: PositiveInt | None = None
    """Iterations between rows with the requested numbers; a multiple of log_interval. Unset: every row."""
    timing_log_level: Annotated[int, Field(ge=0, le=2)] = 0
    """Rows have ``timers_s``, the times of the parts of a step. 1: data, forward and backward, gradient sync and
    optimizer. 2: also forward, backward and pipeline messages. Ranks wait for their device at both ends of a part, so
    that a run is slower."""
    timing_log_option: Literal["minmax", "max", "all"] = "minmax"
    """Times of the fastest and the slowest rank, of the slowest, or of all."""
    barrier_with_level_1_timing: bool = True
    """Ranks wait for each other before each part of level 1, so that it does not contain the wait for a slow rank."""
    profile_steps: list[int] | None = None
    """First and last iteration that torch's profiler records, both included, as in [10, 12]; at most 20. Unset: none.
    Traces for Perfetto and tables of the time by kind are in ``attempts/K/profile`` of the run directory. These
    iterations are slower; their losses are the same."""
    profile_ranks: list[NonNegativeInt] = [0]
    """Ranks that are recorded."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard's event files. Unset: none are written. A relative path is like that of checkpoint.save:
    relative to the config file, or for flags to the working directory. A resumed run goes on in the same folder."""
    tensorboard_log_interval: PositiveInt = 1
    """Iterations between the training rows that go to TensorBoard and all other trackers, of those in metrics.jsonl."""
    tensorboard_queue_size: PositiveInt = 1000
    """Events of TensorBoard that may wait for the disk."""
    wandb_project: str | None = None
    """Project of Weights & Biases that the run goes to. Unset: none. The key is given by ``--secret WANDB_API_KEY``."""
    wandb_entity: str | None = None
    """Team or user of the project. Unset: the key's default."""
    wandb_name: str | None = None
    """Name of the run in Weights & Biases. Unset: the name of the run. A resumed run goes on in the same run there."""
    wandb_group: str | None = None
    """Group of the run in Weights & Biases."""
    wandb_tags: list[str] = []
    """Tags of the run in Weights & Biases."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: for nodes without the internet; ``wandb sync`` sends the files later."""
    wandb_save_dir: str | None = None
    """Folder for the files of Weights & Biases. Unset: the run directory. A relative path is as in tensorboard_dir."""
    mlflow_tracking_uri: str | None = None
    """Address of the MLflow server that the run goes to, without a password."""
    mlflow_experiment: str | None = None
    """Experiment of MLflow; it is made if it is new. Unset: ``Default``."""
    mlflow_run_name: str | None = None
    """Name of the run in MLflow. Unset: the name of the run. A resumed run goes on in the same run there."""
    trackers: list[str] = []
    """Trackers of your own, each as ``module:function``: see trainer/trackers/protocol.py."""

    @field_validator("profile_steps", mode="before")
    @classmethod
    def _check_profile_steps(cls, value: Any) -> Any:
        return None if value is None else first_and_last(value)

    @field_validator("trackers")
    @classmethod
    def _check_functions(cls, value: Any) -> Any:
        return check_functions(value)

    @field_validator("mlflow_tracking_uri")
    @classmethod
    def _check_has_no_password(cls, value: str | None) -> str | None:
        # Everybody who sees a config would see the password.
        if value is not None and re.search(r"://[^/@]*:[^/@]*@", value):
            raise ConfigError(
                "logging.mlflow_tracking_uri",
                "has a password; leave it out, and submit with --secret MLFLOW_TRACKING_PASSWORD",
            )
        return value

    def tracker_packages(self) -> list[tuple[str, str, str]]:
        """Dotted key, module and package of every tracker that is asked for and needs a package."""
        has_uri = self.mlflow_tracking_uri is not None
        named = [
            ("tensorboard_dir", "tensorboard", "tensorboard"),
            ("wandb_project", "wandb", "wandb"),
            ("mlflow_tracking_uri" if has_uri else "mlflow_experiment", "mlflow", "mlflow-skinny"),
        ]
        return [(f"logging.{key}", module, package) for key, module, package in named if getattr(self, key) is not None]
