"""Table of ops, and the requested backend of each op. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.config.kernel_names import BackendChoice
from trainer.planning.parts.attention import keeps_scores
from trainer.planning.pipeline import pipeline_schedule

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

_Condition = Callable[["TrainConfig"], bool]


def _always(_: TrainConfig) -> bool:
    return True


def _has_rms_norm(config: TrainConfig) -> bool:
    return config.model.normalization == "RMSNorm"


def _has_layer_norm(config: TrainConfig) -> bool:
    return config.model.normalization == "LayerNorm" or config.model.embedding_layer_norm


def _has_experts(config: TrainConfig) -> bool:
    return config.model.num_experts is not None


def _drops(config: TrainConfig) -> bool:
    return config.model.hidden_dropout > 0.0


def _keeps_scores(config: TrainConfig) -> bool:
    return keeps_scores(config.model)


def _keeps_scores_of_documents(config: TrainConfig) -> bool:
    return _keeps_scores(config) and config.data.reset_attention_mask


@dataclass(frozen=True)
class Switch:
    """A switch of Megatron-LM in the section training that turns a fused op off.

    Attributes:
        key: name of the switch.
        off: value that turns the op off.
        applies: condition on the config under which the switch affects the op.
    """

    key: str
    off: bool = True
    applies: _Condition = _always


@dataclass(frozen=True)
class Row:
    """One op.

    Attributes:
        module: file in trainer.ops that defines the op, under the op's name in capitals.
        is_used: condition on the config under which a run uses the op.
        switches: switches that turn the op off.
    """

    module: str
    is_used: _Condition = _always
    switches: tuple[Switch, ...] = ()


_PERMUTE_FUSION = (Switch("moe_permute_fusion", off=False),)
_SOFTMAX_FUSION = (Switch("no_masked_softmax_fusion"),)

ROWS: Mapping[str, Row] = {
    "rms_norm": Row("rms_norm", _has_rms_norm),
    "add_rms_norm": Row("rms_norm", _has_rms_norm),
    "layer_norm": Row("layer_norm", _has_layer_norm),
    "activation": Row(
        "activation",
        switches=(
            Switch("no_bias_gelu_fusion", applies=lambda config: not config.model.is_gated),
            Switch("no_bias_swiglu_fusion", applies=lambda config: config.model.is_gated),
        ),
    ),
    # Used without rotary positions too: the op splits the packed queries, keys and values into heads.
    "rope": Row("rotary", lambda config: not config.model.is_encoder_decoder, switches=(Switch("no_rope_fusion"),)),
    "adamw": Row("adamw", lambda config: config.optimizer.optimizer == "adam"),
    "l2_norm": Row("tensor_lists"),
    "bias_dropout_add": Row("bias_dropout_add", _drops, (Switch("no_bias_dropout_fusion"),)),
    "moe_permute": Row("moe_permute", _has_experts, _PERMUTE_FUSION),
    "moe_unpermute": Row("moe_permute", _has_experts, _PERMUTE_FUSION),
    "cross_entropy": Row("cross_entropy", switches=(Switch("cross_entropy_loss_fusion", off=False),)),
    # Only unfused attention with dropout keeps its probabilities; all other attention recomputes them.
    "scaled_masked_softmax": Row("softmax", _keeps_scores_of_documents, _SOFTMAX_FUSION),
    "scaled_causal_softmax": Row("softmax", _keeps_scores, _SOFTMAX_FUSION),
}
"""All ops by name, in the order of reports."""


@dataclass(frozen=True)
class RequestedBackend:
    """Requested backend of one op.

    Attributes:
        backend: name of the backend, or auto.
        key: config key that requests it.
        is_named: True if the key names this op, so that a missing backend is an error.
    """

    backend: BackendChoice
    key: str
    is_named: bool


def requested_backends(config: TrainConfig) -> dict[str, RequestedBackend]:
    """Requested backend of every op that a run uses."""
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
    """Requested backends on the CPU in a GPU run: the offloaded optimizer's step."""
    requested = requested_backends(config)
    if not config.optimizer.optimizer_cpu_offload or "adamw" not in requested:
        return {}
    step = requested["adamw"]
    if step.backend == "native" and not step.is_named:
        # kernel_backend: native is meant for the GPU; a CPU too old for the native build is accepted.
        step = replace(step, backend="auto")
    return {"adamw": step}


def _switch_off(config: TrainConfig, operation: str) -> str | None:
    """Name of the switch that turns ``operation`` off; None: no switch does."""
    for switch in ROWS[operation].switches:
        if getattr(config.training, switch.key) is switch.off and switch.applies(config):
            return switch.key
    return None


def check_kernels(config: TrainConfig) -> None:
    """Refuse unknown ops, and switches that contradict a requested backend or a schedule.

    Raises:
        ConfigError: names the key.
    """
    for operation, backend in config.training.kernel_backends.items():
        if operation not in ROWS:
            near = difflib.get_close_matches(operation, ROWS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"the ops are {', '.join(ROWS)}"
            raise ConfigError("training.kernel_backends", f"{operation!r} is not an op; {hint}")
        switch = _switch_off(config, operation)
        if switch is not None and backend != "reference":
            raise ConfigError(
                f"training.{switch}",
                f"turns {operation} off, but training.kernel_backends requests {backend} for it; drop one of the two",
            )
    if config.parallel.no_gradient_accumulation_fusion and pipeline_schedule(config).startswith("zb"):
        raise ConfigError(
            "parallel.no_gradient_accumulation_fusion",
            f"cannot be combined with the schedule {pipeline_schedule(config)}, which delays weight gradients; leave "
            "it out, or use parallel.pipeline_schedule 1f1b or interleaved",
        )
