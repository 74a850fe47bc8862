"""An imported config at a size that one process trains in a second, with paths below a folder.

Sizes, lengths and layout are reduced. All else is the script's: the kinds of layers, precision, optimizer, data and its
blend, tokenizer, and the meaning of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.blends import path_entries, weight_places

Sections = dict[str, dict[str, Any]]
ITERATIONS = 10
NULL_VOCABULARY = 512
DATA = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
FILES = ("tokenizer_model", "vocab_file", "merge_file")
_SIZES: dict[str, dict[str, Any]] = {
    "model": {
        **{"num_layers": 2, "decoder_num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16},
        **{"num_query_groups": 2, "ffn_hidden_size": 96, "max_position_embeddings": 64, "num_experts": 4},
        **{"moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32},
    },
    "training": {
        **{"seq_length": 64, "decoder_seq_length": 32, "micro_batch_size": 1, "global_batch_size": 4},
        **{"train_iters": ITERATIONS, "eval_interval": 5, "eval_iters": 1, "rampup_batch_size": [2, 2, 8]},
        "step_batch_size_schedule": "0:2 512:4",
    },
    "optimizer": {"lr_decay_iters": ITERATIONS, "lr_warmup_iters": 2, "lr_wsd_decay_iters": 2},
    "data": {"num_workers": 0},
    "logging": {"log_interval": 1},
    "checkpoint": {"save_interval": 5},
}
"""Taken where the script sets the key."""
_ALWAYS = {"training.device": "cpu", "training.train_iters": ITERATIONS, "logging.log_interval": 1}
_DROPPED = {
    "job": "*",
    "model": "vocab_size moe_layer_freq window_layers attention_backend",
    "training": "exit_interval exit_duration_in_mins",
    "parallel": "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size cp_comm_type "
    "expert_model_parallel_size expert_tensor_parallel_size sequence_parallel pipeline_schedule "
    "num_layers_per_virtual_pipeline_stage "
    "num_virtual_stages_per_pipeline_rank pipeline_model_parallel_layout distributed_timeout_minutes "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
    "logging": "wandb_project wandb_entity wandb_name wandb_group wandb_tags wandb_save_dir",
}
"""Layout and job, kernels that only GPUs have, and what would send numbers away."""


class Places:
    """Paths of a script -> paths below a folder; the same one for the same path."""

    def __init__(self, folder: Path) -> None:
        """Begin without paths."""
        self._folder, self._found = folder, dict[str, Path]()

    def of(self, path: str, kind: str) -> str:
        """The place of a path; ``kind`` is the first part of its name."""
        place = self._found.setdefault(path.rstrip("/"), self._folder / f"{kind}{len(self._found)}")
        return str(place)


def small_config(sections: Mapping[str, Mapping[str, Any]], folder: Path) -> Sections:
    """The config of a script, reduced, with all of its paths below ``folder``."""
    found: Sections = {}
    for section, values in sections.items():
        dropped = _DROPPED.get(section, "")
        if dropped == "*":
            continue
        sizes = _SIZES.get(section, {})
        kept = {key: value for key, value in values.items() if key not in dropped.split() and value is not None}
        found[section] = {key: sizes.get(key, value) for key, value in kept.items()}
    for name, value in _ALWAYS.items():
        section, _, key = name.partition(".")
        found.setdefault(section, {})[key] = value
    _place(found, Places(folder))
    _fit(found)
    return found


def _fit(found: Sections) -> None:
    """Keep what belongs together together."""
    model, training = found.get("model", {}), found["training"]
    model["moe_router_topk"] = min(model.get("moe_router_topk", 2), 2)
    if found.get("data", {}).get("tokenizer_type") == "NullTokenizer":
        model["vocab_size"] = NULL_VOCABULARY
    if "num_experts" not in model:
        del model["moe_router_topk"]
    if not {"rampup_batch_size", "step_batch_size_schedule"}.isdisjoint(training):
        training["train_iters"] = ITERATIONS
    if training.get("recompute_num_layers"):
        training["recompute_num_layers"] = 1


def _place(found: Sections, places: Places) -> None:
    data, checkpoint = found.get("data", {}), found.get("checkpoint", {})
    for key in DATA:
        entries = path_entries(data[key]) if key in data else []
        weights = weight_places(entries)
        placed = [one if place in weights else places.of(one, "data") for place, one in enumerate(entries)]
        if key in data:
            data[key] = placed
    for key in FILES:
        if key in data:
            data[key] = places.of(data[key], "tokenizer")
    if "data_cache_path" in data:
        data["data_cache_path"] = places.of(data["data_cache_path"], "cache")
    for key in ("save", "load"):
        if key in checkpoint:
            checkpoint[key] = places.of(checkpoint[key], "checkpoint")
    if "tensorboard_dir" in found.get("logging", {}):
        found["logging"]["tensorboard_dir"] = places.of(found["logging"]["tensorboard_dir"], "tensorboard")
