"""Adapter of megatron-core: GPT model, DDP wrapper, optimizer and pipeline schedules on the CPU."""

import benchmarks.peers.cpu_as_cuda  # isort: skip  # noqa: F401  before anything of megatron's is imported

from collections.abc import Iterator

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from benchmarks.peers.workload import (
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


def transformer_config(task: Task) -> TransformerConfig:
    work = task.work
    return TransformerConfig(
        num_layers=work.layers,
        hidden_size=work.hidden,
        ffn_hidden_size=work.ffn,
        num_attention_heads=work.heads,
        tensor_model_parallel_size=task.tp,
        pipeline_model_parallel_size=task.pp,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        layernorm_epsilon=NORM_EPSILON,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Fused kernels exist for CUDA only.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def build_model(task: Task, config: TransformerConfig) -> GPTModel:
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        task.work.vocab,
        task.work.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=ROTARY_BASE,
        parallel_output=True,
    )


def local_weight(name: str, layer: int, work: Workload, weights: dict[str, Tensor], tp: int) -> Tensor:
    """This rank's slice of the common initial weight with megatron-core's name ``name``."""
    rank = parallel_state.get_tensor_model_parallel_rank()

    def part(key: str, dim: int) -> Tensor:
        return weights[key].chunk(tp, dim)[rank]

    if name.startswith("embedding"):
        return part("model.embed_tokens.weight", 0)
    if name.startswith("output_layer"):
        return part("lm_head.weight", 0)
    if name.startswith("decoder.final"):
        return weights["model.norm.weight"]
    at = f"model.layers.{layer}."
    if "linear_qkv" in name:
        heads = [weights[f"{at}self_attn.{n}_proj.weight"].view(work.heads, -1, work.hidden) for n in "qkv"]
        return torch.cat(heads, 1).reshape(-1, work.hidden).chunk(tp)[rank]
    if "linear_proj" in name:
        return part(f"{at}self_attn.o_proj.weight", 1)
    if "linear_fc1" in name:
        return torch.cat([part(f"{at}mlp.{n}_proj.weight", 0) for n in ("gate", "up")])
    if "linear_fc2" in name:
        return part(f"{at}mlp.down_proj.weight", 1)
    return weights[at + ("input" if "input_layernorm" in name else "post_attention") + "_layernorm.weight"]


@torch.no_grad()
def load(model: GPTModel, task: Task) -> None:
    weights = initial_weights(task.work)
    for name, parameter in model.named_parameters():
        layer = model.decoder.layers[int(name.split(".")[2])].layer_number - 1 if ".layers." in name else -1
        parameter.copy_(local_weight(name, layer, task.work, weights, task.tp))


def adam() -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        min_lr=LEARNING_RATE,
        weight_decay=0.0,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPSILON,
        clip_grad=CLIP_GRAD,
        params_dtype=torch.float32,
    )


def main() -> None:
    task = task_from_command_line()
    work = task.work
    task.join()
    # These two functions access CUDA's default generator directly.
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    parallel_state.initialize_model_parallel(task.tp, task.pp)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = transformer_config(task)
    inner = build_model(task, config)
    load(inner, task)
    overlap = task.dp > 1
    model = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=overlap), inner)
    config.no_sync_func = model.no_sync if overlap else None
    optimizer = get_megatron_optimizer(adam(), [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    forward_backward = get_forward_backward_func()
    tokens, replica = corpus(work), parallel_state.get_data_parallel_rank()
    positions = torch.arange(work.sequence).expand(work.micro_batch, -1)
    mask = torch.triu(torch.ones(1, 1, work.sequence, work.sequence, dtype=torch.bool), 1)

    def forward_step(batches: Iterator[tuple[Tensor, Tensor]], part: torch.nn.Module) -> tuple:
        inputs, labels = next(batches)

        def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses.float().mean()
            # clone(), because the schedule divides the loss in place by the number of micro-batches.
            return loss, {"loss": loss.detach().clone()}

        return part(inputs, positions, mask, labels=labels), mean_loss

    meter = Meter(task)
    for step in range(task.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reported = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches(work, tokens, step, replica, task.dp)),
            model=model,
            num_microbatches=task.micro_batches,
            seq_length=work.sequence,
            micro_batch_size=work.micro_batch,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        loss = sum(entry["loss"] for entry in reported) / len(reported) if reported else None
        meter.step(loss, grad_norm)
    meter.write(f"{megatron.core.__version__}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
