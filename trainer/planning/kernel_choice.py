"""The table of operations, and which backend the training config asks for, operation by operation. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.config.kernel_names import BackendChoice
from trainer.planning.pipeline import pipeline_schedule

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

_Condition = Callable[["TrainConfig"], bool]


def _always(_: TrainConfig) -> bool:
    return True


def _has_rms_norm(config: TrainConfig) -> bool:
    return config.model.normalization == "RMSNorm"


def _has_experts(config: TrainConfig) -> bool:
    return config.model.num_experts is not None


def _drops(config: TrainConfig) -> bool:
    return config.model.hidden_dropout > 0.0


def _drops_shares(config: TrainConfig) -> bool:
    return config.model.attention_dropout > 0.0


def _drops_shares_of_documents(config: TrainConfig) -> bool:
    return _drops_shares(config) and config.data.reset_attention_mask


@dataclass(frozen=True)
class Switch:
    """A switch of Megatron-LM's in the section training that turns an operation off.

    Attributes:
        key: its name.
        off: the value that does so.
        applies: whether it speaks of the operation as this run uses it.
    """

    key: str
    off: bool = True
    applies: _Condition = _always


@dataclass(frozen=True)
class Row:
    """One operation.

    Attributes:
        module: the file in trainer.ops that has it, under its name in capitals.
        is_used: whether a run uses it.
        switches: what turns it off.
    """

    module: str
    is_used: _Condition = _always
    switches: tuple[Switch, ...] = ()


_PERMUTE_FUSION = (Switch("moe_permute_fusion", off=False),)
_SOFTMAX_FUSION = (Switch("no_masked_softmax_fusion"),)

ROWS: Mapping[str, Row] = {
    "rms_norm": Row("rms_norm", _has_rms_norm),
    "add_rms_norm": Row("rms_norm", _has_rms_norm),
    "layer_norm": Row("layer_norm", lambda config: not _has_rms_norm(config)),
    "activation": Row(
        "activation",
        switches=(
            Switch("no_bias_gelu_fusion", applies=lambda config: not config.model.swiglu),
            Switch("no_bias_swiglu_fusion", applies=lambda config: config.model.swiglu),
        ),
    ),
    # It cuts the packed queries, keys and values into heads, turned or not.
    "rope": Row("rotary", switches=(Switch("no_rope_fusion"),)),
    "adamw": Row("adamw", lambda config: config.optimizer.optimizer == "adam"),
    "l2_norm": Row("tensor_lists"),
    "bias_dropout_add": Row("bias_dropout_add", _drops, (Switch("no_bias_dropout_fusion"),)),
    "moe_permute": Row("moe_permute", _has_experts, _PERMUTE_FUSION),
    "moe_unpermute": Row("moe_permute", _has_experts, _PERMUTE_FUSION),
    "cross_entropy": Row("cross_entropy", switches=(Switch("cross_entropy_loss_fusion", off=False),)),
    # Without dropout no attention has its shares in memory: unfused attention computes them again.
    "scaled_masked_softmax": Row("softmax", _drops_shares_of_documents, _SOFTMAX_FUSION),
    "scaled_causal_softmax": Row("softmax", _drops_shares, _SOFTMAX_FUSION),
}
"""Every operation by its name, in the order of reports."""


@dataclass(frozen=True)
class RequestedBackend:
    """What one operation is to run on.

    Attributes:
        backend: the name, or auto.
        key: of the config, that says so.
        is_named: whether the key names this very operation, which must then have such a backend.
    """

    backend: BackendChoice
    key: str
    is_named: bool


def requested_backends(config: TrainConfig) -> dict[str, RequestedBackend]:
    """Operation -> what it is to run on, for the operations that a run uses."""
    training = config.training
    requested = {}
    for operation, row in ROWS.items():
        if not row.is_used(config):
            continue
        switch = _switch_off(config, operation)
        if operation in training.kernel_backends:
            key = f"training.kernel_backends.{operation}"
            requested[operation] = RequestedBackend(training.kernel_backends[operation], key, is_named=True)
        elif switch is not None:
            requested[operation] = RequestedBackend("reference", f"training.{switch}", is_named=True)
        else:
            requested[operation] = RequestedBackend(training.kernel_backend, "training.kernel_backend", is_named=False)
    return requested


def requested_in_cpu_memory(config: TrainConfig) -> dict[str, RequestedBackend]:
    """The same for what a run on a GPU computes in CPU memory: the step of an offloaded optimizer."""
    requested = requested_backends(config)
    if not config.optimizer.optimizer_cpu_offload or "adamw" not in requested:
        return {}
    step = requested["adamw"]
    # What is for GPUs alone, and what takes its place: nvrtc compiles the library's code, which a CPU has too.
    instead: dict[str, BackendChoice] = {"nvrtc": "auto", "compile": "torch"}
    if not step.is_named:
        # Who wants everything on own means what the GPU computes: a host whose processor is too old for it is no error.
        instead["native"] = "auto"
    if step.backend in instead:
        step = replace(step, backend=instead[step.backend], is_named=False)
    return {"adamw": step}


def _switch_off(config: TrainConfig, operation: str) -> str | None:
    """The switch that turns an operation off."""
    for switch in ROWS[operation].switches:
        if getattr(config.training, switch.key) is switch.off and switch.applies(config):
            return switch.key
    return None


def check_kernels(config: TrainConfig) -> None:
    """Refuse operations that there are not, and switches that contradict a name or a schedule.

    Raises:
        ConfigError: names the key.
    """
    for operation, backend in config.training.kernel_backends.items():
        if operation not in ROWS:
            near = difflib.get_close_matches(operation, ROWS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ROWS)}"
            raise ConfigError("training.kernel_backends", f"{operation!r} is no operation with kernels; {hint}")
        switch = _switch_off(config, operation)
        if switch is not None and backend != "reference":
            raise ConfigError(
                f"training.{switch}",
                f"turns {operation} off, which training.kernel_backends wants as {backend}; drop one of the two",
            )
    if config.parallel.no_gradient_accumulation_fusion and pipeline_schedule(config).startswith("zb"):
        raise ConfigError(
            "parallel.no_gradient_accumulation_fusion",
            f"leaves weight gradients to autograd, and {pipeline_schedule(config)} puts them off as the factors of the "
            "product that accumulates them; leave it out, or use the schedule 1f1b or interleaved",
        )
