"""Combinations with the user's own functions that are refused: see refused_combinations.py."""

from __future__ import annotations

from typing import Any

_LOSS = {"loss_function": "own:loss"}
_BERT = {"architecture": "bert", "bert_binary_head": False, "position_embedding_type": "learned_absolute"}

REFUSED_HOOKS: list[tuple[dict[str, dict[str, Any]], str, str, dict[str, dict[str, Any]]]] = [
    (
        {"hooks": _LOSS, "model": _BERT},
        "hooks.loss_function",
        "needs model.architecture decoder",
        {"hooks": {"loss_function": None}},
    ),
    (
        {"hooks": _LOSS, "model": {"mtp_num_layers": 1, "position_embedding_type": "rope"}},
        "hooks.loss_function",
        "cannot be combined with model.mtp_num_layers",
        {"model": {"mtp_num_layers": 0}},
    ),
    (
        {"hooks": _LOSS, "model": {"z_loss_coeff": 1e-4}},
        "hooks.loss_function",
        "a term of the cross entropy that it replaces",
        {"model": {"z_loss_coeff": 0.0}},
    ),
    (
        {"optimizer": {"lr": 1e-3, "decoupled_min_lr": 1e-5}},
        "optimizer.decoupled_min_lr",
        "is only used with decoupled_lr",
        {"optimizer": {"lr": 1e-3, "decoupled_min_lr": 1e-5, "decoupled_lr": 1e-4}},
    ),
    (
        {"optimizer": {"lr": 1e-3, "min_lr": 1e-4, "decoupled_lr": 1e-5}},
        "optimizer.decoupled_lr",
        "is below its minimum 0.0001",
        {"optimizer": {"lr": 1e-3, "min_lr": 1e-4, "decoupled_lr": 1e-5, "decoupled_min_lr": 1e-6}},
    ),
    (
        {"hooks": {"lr_function": "own:rate"}, "optimizer": {"lr": 1e-3, "decoupled_lr": 1e-4}},
        "hooks.lr_function",
        "cannot be combined with optimizer.decoupled_lr",
        {"hooks": {"lr_function": None}},
    ),
    (
        {"hooks": {"lr_function": "own:rate"}, "optimizer": {"lr": 1e-3, "lr_decay_style": "cosine"}},
        "hooks.lr_function",
        "cannot be combined with optimizer.lr_decay_style",
        {"hooks": {"lr_function": None}},
    ),
]
