"""Section ``parallel``: the parallel layout and its messages."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from trainer.config.sections.section import Section


class ParallelConfig(Section):
    """Parallel layout: world size = tp x pp x cp x dp; ep divides dp x cp, or with whole experts tp x dp x cp."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer (tp)."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that hold one group of layers each, one after the other (pp)."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share the tokens of each sample (cp)."""
    cp_comm_type: Literal["p2p", "a2a"] = "p2p"
    """p2p: ring attention; a2a: all-to-all, which shards heads instead of the sequence during attention (Ulysses)."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a layer (ep)."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks of tp that share each expert; divides tensor_model_parallel_size, the default. With fewer, ep also spans
    ranks of tp, which bring different tokens to the experts: larger products, and fewer messages. With 1 each expert is
    whole on its rank. No effect without experts."""
    rank_order: Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"] = "tp-cp-ep-dp-pp"
    """Axes from neighbouring ranks to distant ones. With pp before dp a pipeline is on neighbouring ranks, and messages
    of gradients cross nodes. Results are the same, and checkpoints can be loaded with either order."""
    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel regions along the sequence. No effect when tp is 1."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] | None = None
    """Unset: interleaved if pipeline ranks hold several virtual stages, else 1f1b."""
    num_virtual_stages_per_pipeline_rank: PositiveInt | None = None
    """Virtual stages that each pipeline rank holds, for the interleaved schedule. Unset: one."""
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = None
    """Layers per virtual stage. Cannot be combined with num_virtual_stages_per_pipeline_rank."""
    decoder_first_pipeline_num_layers: NonNegativeInt | None = None
    """Layers of the first pipeline rank. Unset: balanced by cost."""
    decoder_last_pipeline_num_layers: NonNegativeInt | None = None
    """Layers of the last pipeline rank. Unset: balanced by cost."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each virtual stage in Megatron-LM's notation, as in ``Et*3|t*4|t*4|t*3L``. Unset: balanced by cost."""
    use_distributed_optimizer: bool = False
    """ZeRO-1: shard master weights and moments over dp x cp. The same as data_parallel_sharding_strategy: optim."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None = None
    """Training state sharded over dp x cp. no_shard: nothing; optim: ZeRO-1; optim_grads: ZeRO-2; optim_grads_params:
    ZeRO-3."""
    overlap_grad_reduce: bool = True
    """Start reducing a gradient bucket as soon as backward has filled it. No effect with ZeRO-2 and ZeRO-3, which
    always reduce and gather layer by layer while other layers are computed."""
    overlap_param_gather: bool = True
    """With ZeRO-1: gather the updated weights while the next forward runs. No effect otherwise."""
    ddp_bucket_size: PositiveInt | None = None
    """Elements per gradient bucket. Unset: max(40 million, 1 million x dp x cp), as in Megatron-LM; with gloo 1
    million; a single bucket if nothing overlaps. No effect with ZeRO-2 and ZeRO-3."""
    no_gradient_accumulation_fusion: bool = False
    """Let autograd compute weight gradients and add them to the main gradients afterwards, instead of accumulating
    inside the matrix product. ZeRO-2 and ZeRO-3 never accumulate inside the product."""
    high_priority_stream_groups: list[Literal["tp", "cp", "ep", "pp", "dp"]] = ["tp", "cp", "ep", "pp"]
    """Groups of ranks whose messages go before computation that waits for the GPU, where both overlap: messages inside
    a layer before its gradients'. Only with NCCL; the result is the same."""
    distributed_timeout_minutes: float = Field(default=10.0, gt=0.0, le=525_600.0)
    """Timeout of collectives in minutes, after which a rank fails; at most a year."""

    def expert_shares_of(self, tp: int) -> int:
        """Parts of a micro-batch's tokens that different ranks of ``tp`` bring to the experts."""
        divided = self.expert_tensor_parallel_size
        return tp // divided if divided is not None and tp % divided == 0 else 1

    @property
    def expert_shares(self) -> int:
        """Parts of a micro-batch's tokens that different tp ranks bring to the experts."""
        return self.expert_shares_of(self.tensor_model_parallel_size)

    @property
    def expert_tp(self) -> int:
        """Ranks that divide an expert."""
        return self.tensor_model_parallel_size // self.expert_shares

    @property
    def has_whole_experts(self) -> bool:
        """True if tp ranks hold different experts, each whole, or copies of them."""
        return self.expert_tp == 1 < self.tensor_model_parallel_size

    @property
    def expert_places(self) -> int:
        """Ranks of a replica and pipeline rank over which experts may be divided."""
        return self.context_parallel_size * self.expert_shares

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        strategy = self.data_parallel_sharding_strategy or ("optim" if self.use_distributed_optimizer else "no_shard")
        return ("no_shard", "optim", "optim_grads", "optim_grads_params").index(strategy)
