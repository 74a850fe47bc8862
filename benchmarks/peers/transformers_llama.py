"""Adapter of transformers: its Llama and loss with tensor parallelism or DDP.

The training loop is hand-written. transformers has no pipeline parallelism for training. Its Trainer, made for datasets
and checkpoints, is not used.
"""

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

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


def llama_config(work: Workload) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=work.vocab,
        hidden_size=work.hidden,
        intermediate_size=work.ffn,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.heads,
        max_position_embeddings=work.sequence,
        rms_norm_eps=NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": float(ROTARY_BASE)},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
        dtype=torch.float32,
    )


def build_model(task: Task) -> LlamaForCausalLM:
    """The model with the common initial weights, loaded from a checkpoint for tensor parallelism."""
    config = llama_config(task.work)
    if task.tp == 1:
        model = LlamaForCausalLM(config)
        model.load_state_dict(initial_weights(task.work))
        return model.train()
    checkpoint = task.report / "checkpoint"
    if task.rank == 0:
        config.save_pretrained(checkpoint)
        save_file(initial_weights(task.work), checkpoint / "model.safetensors", {"format": "pt"})
    dist.barrier()
    plan = DistributedConfig(tp_size=task.tp, tp_plan="auto")
    loaded = LlamaForCausalLM.from_pretrained(checkpoint, distributed_config=plan, dtype=torch.float32)
    return loaded.train()


def by_kind(model: nn.Module) -> list[list[nn.Parameter]]:
    """Divided and whole parameters separately, as torch's clipping and fused AdamW require."""
    parameters = list(model.parameters())
    kinds = [[p for p in parameters if isinstance(p, DTensor) is divided] for divided in (True, False)]
    return [kind for kind in kinds if kind]


def clip(kinds: list[list[nn.Parameter]]) -> Tensor:
    """Clip all gradients by their common norm, and return the norm."""
    norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, CLIP_GRAD, total)
    return total


def main() -> None:
    task = task_from_command_line()
    work = task.work
    if task.world > 1:
        task.join()
    model = build_model(task)
    parts = DistributedDataParallel(model, gradient_as_bucket_view=True) if task.dp > 1 else model
    kinds = by_kind(model)
    groups = [{"params": kind} for kind in kinds]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0, fused=True)
    tokens, replica = corpus(work), task.rank // task.tp
    tokens_of_replica = work.tokens_per_step // task.dp
    meter = Meter(task)
    for step in range(task.steps):
        total = torch.zeros(())
        batches = micro_batches(work, tokens, step, replica, task.dp)
        for number, (inputs, labels) in enumerate(batches, 1):
            if task.dp > 1:
                parts.require_backward_grad_sync = number == len(batches)
            output = parts(input_ids=inputs, labels=labels, shift_labels=labels, num_items_in_batch=tokens_of_replica)
            output.loss.backward()
            total += output.loss.detach()
        grad_norm = clip(kinds)
        optimizer.step()
        optimizer.zero_grad(set_to_none=task.dp == 1)
        meter.step(total, grad_norm)
    meter.write(transformers.__version__)
    if task.world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
