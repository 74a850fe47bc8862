"""Adapter of our trainer: kernels, model, executor and optimizer as in the training loop."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import llmctl
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
from trainer.config.train_config import TrainConfig
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, ProcessGroups, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.ops.build.build_settings import BuildSettings
from trainer.ops.dispatch.setup import set_up_kernels
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import ParallelModel, build_model
from trainer.pipeline.executor import forward_backward
from trainer.planning.build_config import build_config


def train_config(task: Task) -> TrainConfig:
    work = task.work
    return build_config(
        {
            "model": {
                "num_layers": work.layers,
                "hidden_size": work.hidden,
                "num_attention_heads": work.heads,
                "ffn_hidden_size": work.ffn,
                "position_embedding_type": "rope",
                "rotary_base": float(ROTARY_BASE),
                "normalization": "RMSNorm",
                "norm_epsilon": NORM_EPSILON,
                "swiglu": True,
                "disable_bias_linear": True,
                "untie_embeddings_and_output_weights": True,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "vocab_size": work.vocab,
            },
            "parallel": {
                "tensor_model_parallel_size": task.tp,
                "pipeline_model_parallel_size": task.pp,
                "pipeline_schedule": task.schedule if task.pp > 1 else None,
            },
            "training": {
                "train_iters": task.steps,
                "seq_length": work.sequence,
                "micro_batch_size": work.micro_batch,
                "global_batch_size": work.global_batch,
                "device": "cpu",
                "kernel_backend": task.kernels,
            },
            "optimizer": {
                "lr": LEARNING_RATE,
                "lr_decay_style": "constant",
                "weight_decay": 0.0,
                "adam_beta1": BETAS[0],
                "adam_beta2": BETAS[1],
                "adam_eps": EPSILON,
                "clip_grad": CLIP_GRAD,
            },
            "data": {"mock_data": True},
        }
    )


def whole_weight(name: str, work: Workload, weights: dict[str, Tensor]) -> Tensor:
    """The undivided common initial weight with our trainer's name ``name``."""
    tables = {
        "embedding.word.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if name in tables:
        return weights[tables[name]]
    _, layer, part = name.split(".", 2)
    at = f"model.layers.{layer}."
    if part == "attention.qkv.weight":
        heads = [weights[f"{at}self_attn.{n}_proj.weight"].view(work.heads, -1, work.hidden) for n in "qkv"]
        return torch.cat(heads, 1).reshape(-1, work.hidden)
    if part == "mlp.fc1.weight":
        return torch.stack([weights[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up")])
    names = {
        "attention_norm.weight": "input_layernorm.weight",
        "attention.projection.weight": "self_attn.o_proj.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "mlp.fc2.weight": "mlp.down_proj.weight",
    }
    return weights[at + names[part]]


@torch.no_grad()
def load(model: ParallelModel, work: Workload) -> None:
    weights = initial_weights(work)
    for name, parameter in model.parameters.items():
        layout = model.layouts[name]
        whole = whole_weight(name, work, weights)
        padding = whole.new_zeros((layout.global_shape[0] - whole.shape[0], *whole.shape[1:]))
        parameter.copy_(layout.shard(torch.cat((whole, padding)), model.mesh))


def main() -> None:
    task = task_from_command_line()
    work, world = task.work, task.world
    config = train_config(task)
    device = torch.device("cpu")
    groups = ProcessGroups()
    mesh = ParallelMesh.build(config, task.rank, world)
    task.join()
    if world > 1:
        groups = build_process_groups(mesh, timedelta(minutes=5))
    settings = BuildSettings.from_variables(os.environ)
    selection = set_up_kernels(config, settings, device, torch.float32, is_builder=task.rank == 0)
    # In the log, because the speed without the intended kernels would mislead.
    print("\n".join(selection.lines()), flush=True)
    model = build_model(config, work.vocab, mesh, groups, device, selection.kernels)
    load(model, work)
    optimizer = MixedPrecisionOptimizer(config, model)
    tokens = corpus(work)
    meter = Meter(task)
    for step in range(task.steps):
        pairs = micro_batches(work, tokens, step, mesh.dp_rank, mesh.dp)
        batches = [MicroBatch(*pair, index=mesh.dp_rank + mesh.dp * place) for place, pair in enumerate(pairs)]
        loss_sum = forward_backward(
            model,
            batches,
            valid_tokens=work.tokens_per_step,
            loss_scale=1.0,
            randomness=StepRandomness(config.training.seed, step),
        )
        outcome = optimizer.step(LEARNING_RATE)
        assert outcome.grad_norm is not None
        replica_loss = loss_sum * mesh.dp / work.tokens_per_step if mesh.computes_loss else None
        meter.step(replica_loss, outcome.grad_norm)
    native = sum(backend == "native" for backend in selection.backends.values())
    meter.write(f"{llmctl.__version__}, {native} of {len(selection.backends)} operations on native kernels")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
