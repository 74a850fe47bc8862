"""Published layouts of well-known models, to compare a search with.

Sources: NVIDIA NeMo's performance summaries (Llama 2, Llama 3, GPT-3 175B on DGX H100; published in 8-bit floats, here
in bf16); Narayanan et al. 2021 (arXiv:2104.04473), table 1; Korthikanti et al. 2022 (arXiv:2205.05198), table 5;
MosaicML's llm-foundry, throughput tables of MPT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config

LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}


@dataclass(frozen=True)
class Published:
    """A layout: model, hardware, sizes of the groups, micro batch and batch."""

    shape: tuple[int, int, int, int, int]
    """Layers, width, feed-forward width, heads, query groups."""
    vocabulary: int
    length: int
    device: str
    devices: int
    groups: tuple[int, int, int, int]
    """tp, pp, virtual stages per rank, cp."""
    batches: tuple[int, int]
    """Micro batch and global batch."""
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    sharding: str = "no_shard"

    def config(self) -> TrainConfig:
        """As a config."""
        layers, width, inner, heads, groups = self.shape
        tp, pp, chunks, cp = self.groups
        interleaved = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": chunks}
        return build_config(
            {
                "model": {
                    "num_layers": layers,
                    "hidden_size": width,
                    "ffn_hidden_size": inner,
                    "num_attention_heads": heads,
                    "group_query_attention": groups < heads,
                    **({"num_query_groups": groups} if groups < heads else {}),
                    "attention_dropout": 0.0,
                    "hidden_dropout": 0.0,
                    **self.model,
                },
                "parallel": {
                    "tensor_model_parallel_size": tp,
                    "sequence_parallel": tp > 1,
                    "pipeline_model_parallel_size": pp,
                    "context_parallel_size": cp,
                    "data_parallel_sharding_strategy": self.sharding,
                    **(interleaved if chunks > 1 else {}),
                },
                "training": {
                    "train_iters": 1,
                    "seq_length": self.length,
                    "micro_batch_size": self.batches[0],
                    "global_batch_size": self.batches[1],
                    "bf16": True,
                    **self.training,
                },
                "optimizer": {"lr": 1e-4},
            }
        )


def _llama(shape: tuple[int, int, int, int, int], *rest: Any) -> Published:
    return Published(shape, *rest, model=LLAMA, sharding="optim")


def _full(shape: tuple[int, int, int], *rest: Any, sharding: str = "no_shard") -> Published:
    layers, width, heads = shape
    whole = (layers, width, 4 * width, heads, heads)
    return Published(whole, *rest, training=FULL, sharding=sharding)


_GPT = (51200, 2048, "A100-80GB")
_L3_8B, _L3_70B, _L3_405B = (32, 4096, 14336, 32, 8), (80, 8192, 28672, 64, 8), (126, 16384, 53248, 128, 8)
_GPT_175B = (96, 12288, 49152, 96, 96)
_SHARDED = "optim_grads_params"

PUBLISHED = {
    "nemo-llama2-7b": _llama((32, 4096, 11008, 32, 32), 32000, 4096, "H100", 8, (1, 1, 1, 1), (1, 128)),
    "nemo-llama2-13b": _llama((40, 5120, 13824, 40, 40), 32000, 4096, "H100", 16, (1, 4, 10, 1), (1, 128)),
    "nemo-llama2-70b": _llama((80, 8192, 28672, 64, 8), 32000, 4096, "H100", 64, (4, 4, 20, 1), (1, 128)),
    "nemo-llama3-8b": _llama(_L3_8B, 128256, 8192, "H100", 8, (1, 1, 1, 2), (1, 128)),
    "nemo-llama3-70b": _llama(_L3_70B, 128256, 8192, "H100", 64, (4, 4, 5, 2), (1, 128)),
    "nemo-llama3-70b-128": _llama(_L3_70B, 128256, 8192, "H100", 128, (4, 4, 5, 2), (1, 128)),
    "nemo-llama3-405b": _llama(_L3_405B, 128256, 8192, "H100", 512, (8, 16, 1, 2), (1, 512)),
    "nemo-gpt3-175b": Published(_GPT_175B, 51200, 2048, "H100", 128, (4, 8, 6, 1), (1, 256), sharding="optim"),
    "narayanan-1.7b": _full((24, 2304, 24), *_GPT, 32, (1, 1, 1, 1), (1, 512)),
    "narayanan-3.6b": _full((30, 3072, 32), *_GPT, 64, (2, 1, 1, 1), (1, 512)),
    "narayanan-7.5b": _full((36, 4096, 32), *_GPT, 128, (4, 1, 1, 1), (1, 512)),
    "narayanan-18b": _full((40, 6144, 48), *_GPT, 256, (8, 1, 1, 1), (1, 1024)),
    "narayanan-39b": _full((48, 8192, 64), *_GPT, 512, (8, 2, 1, 1), (1, 1536)),
    "narayanan-76b": _full((60, 10240, 80), *_GPT, 1024, (8, 4, 1, 1), (1, 1792)),
    "narayanan-145b": _full((80, 12288, 96), *_GPT, 1536, (8, 8, 1, 1), (1, 2304)),
    "narayanan-310b": _full((96, 16384, 128), *_GPT, 1920, (8, 16, 1, 1), (1, 2160)),
    "narayanan-530b": _full((105, 20480, 128), *_GPT, 2520, (8, 35, 1, 1), (1, 2520)),
    "narayanan-1t": _full((128, 25600, 160), *_GPT, 3072, (8, 64, 1, 1), (1, 3072)),
    "korthikanti-22b": _full((48, 6144, 64), *_GPT, 8, (8, 1, 1, 1), (4, 4)),
    "korthikanti-175b": _full((96, 12288, 96), *_GPT, 64, (8, 8, 3, 1), (1, 64)),
    "korthikanti-530b": _full((105, 20480, 128), *_GPT, 280, (8, 35, 3, 1), (1, 280)),
    "korthikanti-1t": _full((128, 25600, 160), *_GPT, 512, (8, 64, 1, 1), (1, 512)),
    "mpt-70b": _full((80, 8192, 64), 50368, 2048, "H100", 128, (1, 1, 1, 1), (8, 1024), sharding=_SHARDED),
    "mpt-30b": _full((48, 7168, 56), 50368, 2048, "H100", 8, (1, 1, 1, 1), (3, 504), sharding=_SHARDED),
    "mpt-7b": _full((32, 4096, 32), 50368, 2048, "A100-40GB", 8, (1, 1, 1, 1), (12, 384), sharding=_SHARDED),
}
"""Name -> layout. Where a paper names no micro batch, it is 1."""
