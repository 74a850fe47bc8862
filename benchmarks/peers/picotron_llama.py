"""Adapter of picotron: its Llama with tensor, pipeline and data parallelism on the CPU.

PYTHONPATH names picotron's source tree. picotron does not clip gradients, so this adapter clips them. picotron's
pipeline does not divide the loss by the number of micro-batches, so its gradients are too large by this factor.
Clipping and AdamW hide the error from the losses, but the gradient norms show it.
"""

import os
import sys
import types

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.workload import (
    BETAS,
    CLIP_GRAD,
    EPSILON,
    LEARNING_RATE,
    NORM_EPSILON,
    ROTARY_BASE,
    Meter,
    Task,
    corpus,
    initial_weights,
    micro_batches,
    task_from_command_line,
)

# picotron imports flash-attn even if unused. Without these three settings it rounds its rotary tables to bfloat16.
for name, wanted in {
    "flash_attn_interface": "flash_attn_func",
    "layers.rotary": "apply_rotary_emb",
    "ops.triton.layer_norm": "layer_norm_fn",
}.items():
    stand_in = types.ModuleType(f"flash_attn.{name}")
    setattr(stand_in, wanted, None)
    sys.modules[stand_in.__name__] = stand_in
os.environ |= {"FLASH_ATTEN": "0", "DEVICE": "cpu", "DTYPE": "float32"}
torch.cuda.synchronize = lambda *_: None

import picotron.process_group_manager as grid  # noqa: E402
from picotron.data_parallel.data_parallel import DataParallelBucket  # noqa: E402
from picotron.model import Llama  # noqa: E402
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, train_step_pipeline_1f1b  # noqa: E402
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel  # noqa: E402


def common_name(name: str) -> str:
    """Name of an initial weight from picotron's name."""
    tables = {"embedding.": "model.embed_tokens.", "final_norm.": "model.norm.", "final_proj.": "lm_head."}
    for theirs, ours in tables.items():
        if name.startswith(theirs):
            return name.replace(theirs, ours)
    name = name.replace("decoder_layers.", "model.layers.").replace(".attention.", ".self_attn.")
    return name.replace(".out_proj.", ".o_proj.")


@torch.no_grad()
def load(model: nn.Module, task: Task) -> list[nn.Parameter]:
    """Load the common initial weights. Returns the parameters that are divided among ranks."""
    weights = initial_weights(task.work)
    divided = []
    for name, parameter in model.named_parameters():
        whole = weights[common_name(name)]
        part = whole
        for dim in range(whole.dim()):
            if whole.shape[dim] != parameter.shape[dim]:
                part = whole.chunk(task.tp, dim)[grid.process_group_manager.tp_rank]
                divided.append(parameter)
        parameter.copy_(part)
    return divided


def build_model(task: Task) -> tuple[nn.Module, list[nn.Parameter]]:
    """The model in its parallel wrappers, and the parameters that tensor parallelism divides."""
    work = task.work
    config = types.SimpleNamespace(
        vocab_size=work.vocab,
        hidden_size=work.hidden,
        num_attention_heads=work.heads,
        num_key_value_heads=work.heads,
        intermediate_size=work.ffn,
        num_hidden_layers=work.layers,
        max_position_embeddings=work.sequence,
        rms_norm_eps=NORM_EPSILON,
        rope_theta=float(ROTARY_BASE),
    )
    model: nn.Module = Llama(config)
    if task.tp > 1:
        model = apply_tensor_parallel(model)
    if task.pp > 1:
        model = PipelineParallel(model, config)
    divided = load(model, task)
    return (DataParallelBucket(model) if task.dp > 1 else model), divided


def clip(model: nn.Module, divided: list[nn.Parameter]) -> Tensor:
    """Clip by the norm over the whole model, and return the norm."""
    known, parameters = {id(parameter) for parameter in divided}, list(model.parameters())
    whole = [p for p in parameters if id(p) not in known]
    square = nn.utils.get_total_norm([p.grad for p in divided]) ** 2 if divided else torch.zeros(())
    if divided:
        dist.all_reduce(square, group=grid.process_group_manager.tp_group)
    square += nn.utils.get_total_norm([p.grad for p in whole]) ** 2
    if grid.process_group_manager.pp_world_size > 1:
        dist.all_reduce(square, group=grid.process_group_manager.pp_group)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, CLIP_GRAD, norm)
    return norm


class Batches:
    """Data loader with the interface that picotron's pipeline needs."""

    def __init__(self, task: Task, step: int, tokens: Tensor) -> None:
        pairs = micro_batches(task.work, tokens, step, grid.process_group_manager.dp_rank, task.dp)
        self.grad_acc_steps = len(pairs)
        self._pairs = iter(pairs)
        self._positions = torch.arange(task.work.sequence).expand(task.work.micro_batch, -1)

    def __next__(self) -> dict[str, Tensor | None]:
        inputs, labels = next(self._pairs)
        return {
            "input_ids": inputs,
            "target_ids": labels,
            "position_ids": self._positions,
            "hidden_states": None,
        }


def accumulate(model: nn.Module, batches: Batches) -> float:
    """Accumulate the gradients of all micro-batches on one stage. Returns their mean loss."""
    total = 0.0
    for number in range(1, batches.grad_acc_steps + 1):
        batch = next(batches)
        if isinstance(model, DataParallelBucket):
            model.require_backward_grad_sync = number == batches.grad_acc_steps
        logits = model(input_ids=batch["input_ids"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["target_ids"].flatten())
        (loss / batches.grad_acc_steps).backward()
        total += loss.item() / batches.grad_acc_steps
    return total


def main() -> None:
    task = task_from_command_line()
    work = task.work
    task.join()
    grid.setup_process_group_manager(task.tp, 1, task.pp, task.dp)
    model, divided = build_model(task)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0, fused=True
    )
    tokens, shape = corpus(work), (work.micro_batch, work.sequence, work.hidden)
    meter = Meter(task)
    for step in range(task.steps):
        optimizer.zero_grad()
        batches = Batches(task, step, tokens)
        if task.pp > 1:
            loss = train_step_pipeline_1f1b(model, batches, shape, torch.device("cpu"), torch.float32)
        else:
            loss = accumulate(model, batches)
        grad_norm = clip(model, divided)
        optimizer.step()
        if isinstance(model, DataParallelBucket):
            model.reset()
        meter.step(loss if grid.process_group_manager.pp_is_last_stage else None, grad_norm)
    meter.write("59714b1")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
