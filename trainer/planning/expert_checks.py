"""Checks of the keys of experts and their router. Torch-free."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.planning.layouts import divisors

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.config.train_config import TrainConfig


_WITH_EXPERTS = (
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_norm_topk_prob",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_group_score",
    "moe_router_bias",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)


_NOT_BESIDE_SINKHORN = ("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "moe_router_num_groups")


def check_experts(config: TrainConfig) -> None:
    """Refuse keys of the router that contradict each other, and a list of layers of the wrong length.

    Raises:
        ConfigError: names the key.
    """
    model = config.model
    pattern = model.moe_layer_freq
    if isinstance(pattern, list) and len(pattern) != model.num_layers:
        raise ConfigError(
            "model.moe_layer_freq",
            f"has {len(pattern)} entries, but needs one entry for each of the {model.num_layers} layers; lengthen or "
            "shorten the list, or give a number N to put experts in every N-th layer",
        )
    if model.num_experts is None:
        return
    if isinstance(pattern, list) and not any(pattern):
        raise ConfigError("model.moe_layer_freq", "gives no layer experts; set a 1, or leave num_experts out")
    _check_shared_expert(model)
    _check_sinkhorn(model)
    _check_scores(model)
    _check_groups(model, model.num_experts)


def _check_shared_expert(model: ModelConfig) -> None:
    if not model.moe_shared_expert_gate:
        return
    if model.moe_shared_expert_intermediate_size is None:
        raise ConfigError(
            "model.moe_shared_expert_gate",
            "needs a shared expert; set moe_shared_expert_intermediate_size, or leave this key out",
        )
    if not model.disable_bias_linear:
        raise ConfigError(
            "model.moe_shared_expert_gate",
            "is not supported with biases of the shared expert; set disable_bias_linear, or leave this key out",
        )


def _check_sinkhorn(model: ModelConfig) -> None:
    if model.moe_router_load_balancing_type != "sinkhorn":
        return
    fields = type(model).model_fields
    of_sinkhorn = {
        "moe_router_score_function": model.router_score_function,
        "moe_router_pre_softmax": model.router_pre_softmax,
        **dict.fromkeys(_NOT_BESIDE_SINKHORN),
    }
    for name, own in of_sinkhorn.items():
        if getattr(model, name) not in (fields[name].default, own):
            scores = "sigmoids with moe_router_topk 1, else a softmax over all experts"
            raise ConfigError(
                f"model.{name}",
                f"has no effect with moe_router_load_balancing_type sinkhorn, whose scores are {scores}; leave this "
                "key out, or use aux_loss",
            )


def _check_scores(model: ModelConfig) -> None:
    is_sigmoid = model.router_score_function == "sigmoid"
    if not model.moe_router_norm_topk_prob and not is_sigmoid:
        raise ConfigError(
            "model.moe_router_norm_topk_prob",
            "off needs moe_router_score_function sigmoid; with softmax set moe_router_pre_softmax instead",
        )
    if model.moe_router_enable_expert_bias and not is_sigmoid:
        raise ConfigError(
            "model.moe_router_enable_expert_bias",
            "needs moe_router_score_function sigmoid, but that is softmax; change it, or leave this key out",
        )
    rate = type(model).model_fields["moe_router_bias_update_rate"].default
    if model.moe_router_bias_update_rate != rate and not model.moe_router_enable_expert_bias:
        raise ConfigError(
            "model.moe_router_bias_update_rate",
            "needs moe_router_enable_expert_bias, which is off; switch that on, or leave this key out",
        )


def _check_groups(model: ModelConfig, experts: int) -> None:
    groups, best, needs_two = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_group_score
    if groups is None:
        for name in ("moe_router_group_topk", "moe_router_group_score"):
            if getattr(model, name) != type(model).model_fields[name].default:
                raise ConfigError(f"model.{name}", "needs moe_router_num_groups; set that, or leave this key out")
        return
    if best is None:
        raise ConfigError("model.moe_router_group_topk", "is unset, but moe_router_num_groups needs it; set it")
    if experts % groups:
        raise ConfigError(
            "model.moe_router_num_groups", f"{groups} does not divide model.num_experts {experts}; use a divisor"
        )
    if best > groups:
        raise ConfigError("model.moe_router_group_topk", f"{best} is above moe_router_num_groups {groups}; lower it")
    if model.moe_router_topk > best * (experts // groups):
        raise ConfigError(
            "model.moe_router_topk",
            f"{model.moe_router_topk} is above the {best * (experts // groups)} experts of the moe_router_group_topk "
            f"{best} best groups; lower it, or raise moe_router_group_topk",
        )
    if needs_two == "top2" and experts // groups < 2:
        raise ConfigError(
            "model.moe_router_group_score", "top2 needs groups of two experts or more; use max, or fewer groups"
        )


def check_expert_keys(config: TrainConfig) -> None:
    """Refuse keys of experts in a dense model, and experts that do not divide over the ranks.

    Raises:
        ConfigError: names the key.
    """
    model, ep = config.model, config.parallel.expert_model_parallel_size
    if model.num_experts is None:
        for name in _WITH_EXPERTS:
            if getattr(model, name) != type(model).model_fields[name].default:
                raise ConfigError(
                    f"model.{name}", "needs mixture-of-experts layers; set model.num_experts, or leave the key out"
                )
    elif model.num_experts % ep:
        raise ConfigError(
            "parallel.expert_model_parallel_size",
            f"{ep} does not divide model.num_experts {model.num_experts}; use one of {divisors(model.num_experts)}",
        )


def check_expert_ranks(config: TrainConfig, dp: int) -> None:
    """Refuse expert parallelism that does not divide the ranks over which experts may be divided.

    Those hold copies of everything else; experts that not all tp ranks divide are divided over ranks of tp too.

    Args:
        config: with tp, pp and cp that divide the world.
        dp: number of replicas.

    Raises:
        ConfigError: names the sizes that fit.
    """
    parallel, ep = config.parallel, config.parallel.expert_model_parallel_size
    places, cp = dp * parallel.expert_places, parallel.context_parallel_size
    if places % ep:
        with_tp = f"{parallel.expert_shares} of TP x " if parallel.expert_shares > 1 else ""
        raise ConfigError(
            "parallel.expert_model_parallel_size",
            f"{ep} does not divide {with_tp}DP {dp} x CP {cp} = {places}, over which experts are divided; use one of "
            f"{divisors(math.gcd(places, config.model.num_experts or 1))}",
        )
