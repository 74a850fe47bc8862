"""Published runs: their figures as the sources print them, and a config for each.

A source names what it measured, and not always the whole shape. What is assumed then stands in SOURCES and in
``PublishedRun.config``: layers from the number of parameters, heads of at most 128, and a micro batch of 1.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config
from trainer.planning.estimate.devices import DEVICES, Device
from trainer.planning.estimate.plan import RunPlan, plan_run
from trainer.planning.flops import flops_per_token
from trainer.planning.schedule.placement import ScheduleError

ROWS = Path(__file__).parent / "rows.csv"
_VOCABULARY = 51200
_SHARDING = {"0": "no_shard", "1": "optim", "2": "optim_grads", "3": "optim_grads_params"}


@dataclass(frozen=True)
class Source:
    """Origin of rows, and all that holds for each of them.

    Attributes:
        citation: document or ``repository@commit path``.
        model: keys of the model that its shape does not tell.
        casts_logits: its trainer computes the loss from a float32 copy of the logits.
        adds_gradients: its trainer adds the gradients of micro-batches in passes of their own.
        zero: stage where a row names none.
        sequence_parallel: with tensor parallelism, where a row does not say.
        per_node: devices of a node.
        links: GB per second and direction of a device to others of its node, and to other nodes, where the source
            names slower ones than most machines of that device have.
        counts_tensors: its memory is that of tensors, as torch counts what is allocated.
    """

    citation: str
    model: Mapping[str, Any] = field(default_factory=dict)
    zero: str = "0"
    sequence_parallel: bool = False
    per_node: int = 8
    casts_logits: bool = False
    adds_gradients: bool = False
    links: tuple[float, float] | None = None
    counts_tensors: bool = False


_WITH_DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "attention_backend": "unfused"}
_LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
_MPT = {"disable_bias_linear": True, "position_embedding_type": "alibi", "attention_backend": "flash"}
SOURCES = {
    "narayanan": Source("Narayanan et al. 2021 (arXiv:2104.04473), table 1", _WITH_DROPOUT, casts_logits=True),
    "megatron-lm": Source(
        "NVIDIA/Megatron-LM@d98e8a64 images/model_table.png, README", {}, "1", sequence_parallel=True
    ),
    "korthikanti": Source("Korthikanti et al. 2022 (arXiv:2205.05198), table 5", _WITH_DROPOUT, casts_logits=True),
    "megatron-v1": Source("nv-adlr/nv-adlr.github.io@2624eac _projects/megatron-lm-v1.md", _WITH_DROPOUT),
    "llm-foundry": Source("mosaicml/llm-foundry@8c8dd48 scripts/train/benchmarking/README.md", _MPT),
    "nanotron": Source(
        "the Ultra-Scale Playbook, vinjn/nanotron-ultrascale-playbook@924e4d0 assets/data/benchmarks",
        {**_LLAMA, "attention_backend": "flash"},
        sequence_parallel=True,
        casts_logits=True,
        adds_gradients=True,
    ),
    "nemo-24.12": Source("NVIDIA NeMo 24.12, performance summary", {}, "1", sequence_parallel=True),
    "nemo-24.07": Source("NVIDIA/NeMo@070a0bb docs/source/performance", {}, "1", sequence_parallel=True),
    "bloom": Source(
        "bigscience-workshop/bigscience@9e64ede train/tr11-176B-ml/chronicles-prequel.md, README.md",
        {},
        "1",
        casts_logits=True,
        # 4 NVLinks of 25 GB/s to each neighbour, and 4 Omni-Path adapters of 100 Gb/s a node.
        links=(100, 6.25),
    ),
    "gpt-1.3b": Source(
        "bigscience-workshop/bigscience@9e64ede experiments/tr3m-1B3.md",
        _WITH_DROPOUT,
        "1",
        per_node=4,
        casts_logits=True,
    ),
    "llmctl": Source("benchmarks/results/gpu-2026-11-26.md", _LLAMA, counts_tensors=True),
    "fms-fsdp": Source("foundation-model-stack/fms-fsdp@5a296afe README.md", _LLAMA),
    "torchtitan": Source("pytorch/torchtitan@613bfd0cf docs/performance.md", _LLAMA, casts_logits=True),
    "gpt-2-largest": Source(
        "bigscience-workshop/bigscience@9e64ede experiments/gpt2.md", _WITH_DROPOUT, per_node=4, casts_logits=True
    ),
}


class NotExpressedError(Exception):
    """A row that no config of the trainer stands for; the message is the reason."""


@dataclass(frozen=True)
class PublishedRun:
    """One row, as text; empty: the source does not say.

    ``tflops`` is only there without another figure of speed. ``memory_gb`` is what the source calls GB.
    """

    source: str
    model: str
    billions: str
    layers: str
    hidden: str
    ffn: str
    heads: str
    groups: str
    vocabulary: str
    length: str
    device: str
    devices: str
    tp: str
    pp: str
    chunks: str
    cp: str
    dp: str
    zero: str
    micro_batch: str
    batch: str
    recompute: str
    sequence_parallel: str
    precision: str
    fused_attention: str
    tflops: str
    tokens_per_s: str
    step_s: str
    memory_gb: str
    outcome: str

    @property
    def table_size(self) -> int:
        """Token ids."""
        return int(self.vocabulary or _VOCABULARY)

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return min(int(self.devices), SOURCES[self.source].per_node)

    @property
    def group(self) -> str:
        """Runs of one model on the same hardware, which differ in their layout."""
        return f"{self.source}, {self.model}, {self.devices} x {self.device}, {self.length} tokens, batch {self.batch}"

    @property
    def hardware(self) -> Device:
        """The device, with the links of its machine."""
        device, links = DEVICES[self.device], SOURCES[self.source].links
        return device if links is None else replace(device, within=links[0] * 1e9, between=links[1] * 1e9)

    def config(self) -> TrainConfig:
        """The config.

        Raises:
            NotExpressedError: with the reason.
            ConfigError: the trainer refuses the config.
        """
        if "fp8" in self.precision:
            raise NotExpressedError("8-bit floats")
        if not self.hidden or not self.length:
            raise NotExpressedError("no shape in the source")
        source = SOURCES[self.source]
        zero, sequence = self.zero or source.zero, self.sequence_parallel or source.sequence_parallel
        chunks = int(self.chunks)
        interleaved = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": chunks}
        return build_config(
            {
                "model": self._model(source),
                "parallel": {
                    "tensor_model_parallel_size": int(self.tp),
                    "sequence_parallel": int(self.tp) > 1 and sequence in ("yes", True),
                    "pipeline_model_parallel_size": int(self.pp),
                    "context_parallel_size": int(self.cp),
                    "data_parallel_sharding_strategy": _SHARDING[zero],
                    "no_gradient_accumulation_fusion": source.adds_gradients,
                    **(interleaved if chunks > 1 else {}),
                },
                "training": {
                    "train_iters": 1,
                    "seq_length": int(self.length),
                    "micro_batch_size": int(self.micro_batch or 1),
                    "global_batch_size": int(self.batch),
                    "fp16": self.precision == "fp16",
                    "bf16": self.precision != "fp16",
                    **({"kernel_backends": {"cross_entropy": "reference"}} if source.casts_logits else {}),
                    **self._recompute(),
                },
                "optimizer": {"lr": 1e-4},
            }
        )

    def _model(self, source: Source) -> dict[str, Any]:
        hidden = int(self.hidden)
        layers = (
            int(self.layers)
            if self.layers
            else round((float(self.billions) * 1e9 / hidden - _VOCABULARY) / hidden / 12)
        )
        heads = int(self.heads) if self.heads else _heads(hidden, int(self.tp))
        groups = int(self.groups or heads)
        backend = {"attention_backend": "unfused"} if self.fused_attention == "no" else {}
        return {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": int(self.ffn or 4 * hidden),
            "num_attention_heads": heads,
            "max_position_embeddings": int(self.length),
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            **({"group_query_attention": True, "num_query_groups": groups} if groups < heads else {}),
            **backend,
            **source.model,
        }

    def _recompute(self) -> dict[str, Any]:
        if self.recompute == "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform"}
        return {"recompute_granularity": "selective"} if self.recompute == "selective" else {}

    def plan(self) -> RunPlan:
        """The prediction.

        Raises:
            NotExpressedError: with the reason.
        """
        try:
            nodes = int(self.devices) // self.per_node
            return plan_run(self.config(), self.table_size, self.hardware, nodes, self.per_node)
        except (ConfigError, ScheduleError) as error:
            raise NotExpressedError(f"refused: {error}") from None

    def seconds(self, config: TrainConfig) -> float | None:
        """Measured seconds of an iteration; None: the source has no figure of speed."""
        tokens = int(self.batch) * int(self.length)
        if self.step_s:
            return float(self.step_s)
        if self.tokens_per_s:
            return tokens / float(self.tokens_per_s) / int(self.devices)
        if not self.tflops:
            return None
        per_token = flops_per_token(config, self.table_size)
        if self.source == "narayanan":
            # With the recomputed forward, as the paper counts.
            layers, hidden, length = config.model.num_layers, config.model.hidden_size, int(self.length)
            per_token = 96 * layers * hidden**2 * (1 + length / 6 / hidden + self.table_size / 16 / layers / hidden)
        return tokens * per_token / float(self.tflops) / 1e12 / int(self.devices)


def _heads(hidden: int, tp: int) -> int:
    """The fewest heads of at most 128 that divide the width and are divided by ``tp``."""
    return next(count for count in range(-(-hidden // 128), hidden + 1) if hidden % count == 0 and count % tp == 0)


def published_runs() -> list[PublishedRun]:
    """All rows, in the order of the file."""
    with ROWS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [PublishedRun(**{each.name: row[each.name] for each in fields(PublishedRun)}) for row in rows]
