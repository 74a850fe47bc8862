"""Adapter of torchtitan: its Llama 3, parallelisms, loss and clipping on the CPU.

The loop follows torchtitan's trainer. The released trainer does not run here for two reasons. It needs a newer pipeline
API than the released torch has, so this adapter passes the whole batch to the pipeline. It rejects
scaled_dot_product_attention for language models, and its two other kinds of attention need a GPU, so this adapter
substitutes scaled_dot_product_attention. Data parallelism is replication, without torch's sharding.
"""

import torch
import torch._utils

# torchtitan assumes CUDA without an accelerator, and queries more of the device than a CPU supports.
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.set_device = torch.cpu.empty_cache = lambda *_: None

from importlib.metadata import version  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import torch.distributed as dist  # noqa: E402
import torchtitan.models.llama3 as llama3  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as titan_distributed  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

from benchmarks.peers.workload import (  # noqa: E402
    BETAS,
    CLIP_GRAD,
    EPSILON,
    LEARNING_RATE,
    NORM_EPSILON,
    ROTARY_BASE,
    Meter,
    Task,
    Workload,
    corpus,
    initial_weights,
    micro_batches,
    task_from_command_line,
)

CPU = torch.device("cpu")


def model_config(work: Workload) -> llama3.Llama3Model.Config:
    # Every weight is overwritten, but the configuration requires an initializer.
    ones, draw = {"weight": nn.init.ones_}, {"weight": nn.init.normal_}
    llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()
    layers = llama3._build_llama3_layers(
        n_layers=work.layers,
        dim=work.hidden,
        n_heads=work.heads,
        hidden_dim=work.ffn,
        rope=ComplexRoPE.Config(
            dim=work.hidden // work.heads, max_seq_len=work.sequence, theta=float(ROTARY_BASE), scaling="none"
        ),
        fuse_qkv=False,
        attn_backend="sdpa",
    )
    for layer in layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = NORM_EPSILON
    return llama3.Llama3Model.Config(
        dim=work.hidden,
        vocab_size=work.vocab,
        tok_embeddings=Embedding.Config(num_embeddings=work.vocab, embedding_dim=work.hidden, param_init=draw),
        norm=RMSNorm.Config(normalized_shape=work.hidden, eps=NORM_EPSILON, param_init=ones),
        lm_head=Linear.Config(in_features=work.hidden, out_features=work.vocab, param_init=draw),
        layers=layers,
    )


class Trainer:
    """Model parts of this rank, with their schedule and optimizer."""

    def __init__(self, task: Task) -> None:
        work = task.work
        self._task = task
        parallelism = ParallelismConfig(
            tensor_parallel_degree=task.tp,
            # Off: the CPU has enough memory, and gloo's all-gather and reduce-scatter are slower than its all-reduce.
            enable_sequence_parallel=False,
            pipeline_parallel_degree=task.pp,
            pipeline_parallel_microbatch_size=work.micro_batch,
            pipeline_parallel_schedule=task.schedule,
            data_parallel_replicate_degree=task.dp,
            data_parallel_shard_degree=1,
            # The default fails with the released torch.
            spmd_backend="partial_dtensor",
        )
        training = TrainingConfig(
            local_batch_size=work.global_batch // task.dp,
            global_batch_size=work.global_batch,
            seq_len=work.sequence,
            steps=task.steps,
            mixed_precision_param="float32",
            mixed_precision_reduce="float32",
            disable_cuda_graphs=True,
        )
        self.dims = ParallelDims.from_config(parallelism, task.world)
        titan_distributed.set_spmd_backend(parallelism.spmd_backend)
        self._context = titan_distributed.get_spmd_context(parallel_dims=self.dims)
        self._loss = CrossEntropyLoss.Config(global_vocab_size=work.vocab).build(compile_config=CompileConfig())
        self._valid_tokens = torch.tensor(work.tokens_per_step)
        self._build(model_config(work), parallelism, training)
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    # The default needs a reduction that gloo lacks.
                    module.set_force_sum_reduction_for_comms(True)

    def _build(self, config: llama3.Llama3Model.Config, parallelism: ParallelismConfig, training: TrainingConfig):
        debug = SimpleNamespace(moe_force_load_balance=False)
        settings = {"training": training, "parallelism": parallelism}
        config.update_from_config(config=SimpleNamespace(compile=CompileConfig(), debug=debug, **settings))
        with torch.device("meta"):
            model = config.build()
        common = {"parallel_dims": self.dims, "compile_config": CompileConfig(), "ac_config": None, **settings}
        common["dump_folder"] = str(self._task.report)
        self._schedule = None
        self.is_first = self.is_last = True
        if self._task.pp > 1:
            self._schedule, self.parts, self.is_first, self.is_last = pipeline_llm(
                model,
                device=CPU,
                model_config=config,
                parallelize_fn=llama3.parallelize_llama,
                loss_fn=self._loss,
                **common,
            )
        else:
            self.parts = [llama3.parallelize_llama(model, **common)]
        self._load(config)

    @torch.no_grad()
    def _load(self, config: llama3.Llama3Model.Config) -> None:
        adapter = llama3.Llama3StateDictAdapter(config, None)
        # torchtitan uses Llama 3.1's scaled rotary positions.
        adapter._validate_hf_rope_config = lambda _: None
        weights = adapter.from_hf(initial_weights(self._task.work))
        for part in self.parts:
            part.to_empty(device=CPU)
            part.init_weights(buffer_device=None)
            for name, parameter in part.named_parameters():
                whole = weights[name]
                if isinstance(parameter, DTensor):
                    whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                parameter.copy_(whole)
            part.train()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of all model parts."""
        return [parameter for part in self.parts for parameter in part.parameters()]

    def forward_backward(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor | None:
        """Compute the gradients. Returns this replica's share of the loss on the last stage."""
        total = torch.zeros(())
        if self._schedule is None:
            for inputs, labels in batches:
                with self._context():
                    loss, _ = self._loss(self.parts[0](inputs), labels, self._valid_tokens)
                    loss.backward()
                total += loss.detach()
            return total
        inputs, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        losses: list[Tensor] = []
        with self._context():
            self._schedule.step(
                *([inputs] if self.is_first else []),
                target=labels if self.is_last else None,
                losses=losses if self.is_last else None,
                loss_kwargs={"global_valid_tokens": self._valid_tokens},
                return_outputs=False,
            )
        return torch.stack(losses).sum() if self.is_last else None


def main() -> None:
    task = task_from_command_line()
    task.join()
    trainer = Trainer(task)
    parameters = trainer.model.sharding
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0, fused=True)
    tokens = corpus(task.work)
    replica = trainer.dims.get_mesh("batch").get_local_rank() if trainer.dims.dp_enabled else 0
    meter = Meter(task)
    for step in range(task.steps):
        optimizer.zero_grad()
        loss = trainer.forward_backward(micro_batches(task.work, tokens, step, replica, task.dp))
        grad_norm = titan_distributed.clip_grad_norm_(
            parameters, CLIP_GRAD, foreach=True, pp_mesh=trainer.dims.get_optional_mesh("pp")
        )
        optimizer.step()
        meter.step(None if loss is None else loss * task.dp, grad_norm)
    meter.write(version("torchtitan"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
