"""A hand-written PyTorch loop for one process or DDP, without a framework."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.workload import (
    BETAS,
    CLIP_GRAD,
    EPSILON,
    LEARNING_RATE,
    NORM_EPSILON,
    ROTARY_BASE,
    Meter,
    Workload,
    corpus,
    initial_weights,
    micro_batches,
    task_from_command_line,
)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Layer(nn.Module):
    """Attention and feed-forward, with packed projections."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.heads, self.hidden = work.heads, work.hidden
        self.norm1, self.norm2 = nn.Parameter(torch.ones(work.hidden)), nn.Parameter(torch.ones(work.hidden))
        self.qkv = nn.Linear(work.hidden, 3 * work.hidden, bias=False)
        self.out = nn.Linear(work.hidden, work.hidden, bias=False)
        self.gate_up = nn.Linear(work.hidden, 2 * work.ffn, bias=False)
        self.down = nn.Linear(work.ffn, work.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        batch, sequence, hidden = x.shape
        packed = self.qkv(F.rms_norm(x, (hidden,), self.norm1, NORM_EPSILON))
        q, k, v = (t.view(batch, sequence, self.heads, -1).transpose(1, 2) for t in packed.chunk(3, -1))
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        gate, up = self.gate_up(F.rms_norm(x, (hidden,), self.norm2, NORM_EPSILON)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """The model with its loss."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.hidden = work.hidden
        self.embedding = nn.Embedding(work.vocab, work.hidden)
        self.layers = nn.ModuleList(Layer(work) for _ in range(work.layers))
        self.norm = nn.Parameter(torch.ones(work.hidden))
        self.head = nn.Linear(work.hidden, work.vocab, bias=False)
        width = work.hidden // work.heads
        frequency = ROTARY_BASE ** -(torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(work.sequence).float(), frequency)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Load the common initial weights."""
        self.embedding.weight.copy_(weights["model.embed_tokens.weight"])
        self.norm.copy_(weights["model.norm.weight"])
        self.head.weight.copy_(weights["lm_head.weight"])
        for number, layer in enumerate(self.layers):
            at = f"model.layers.{number}."
            layer.qkv.weight.copy_(torch.cat([weights[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]))
            layer.out.weight.copy_(weights[f"{at}self_attn.o_proj.weight"])
            layer.gate_up.weight.copy_(torch.cat([weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")]))
            layer.down.weight.copy_(weights[f"{at}mlp.down_proj.weight"])
            layer.norm1.copy_(weights[f"{at}input_layernorm.weight"])
            layer.norm2.copy_(weights[f"{at}post_attention_layernorm.weight"])

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of one micro-batch."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(F.rms_norm(x, (self.hidden,), self.norm, NORM_EPSILON))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    task = task_from_command_line()
    work = task.work
    model = Decoder(work)
    model.load(initial_weights(work))
    parts: nn.Module = model
    if task.dp > 1:
        task.join()
        parts = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0, fused=True
    )
    tokens = corpus(work)
    meter = Meter(task)
    for step in range(task.steps):
        total = torch.zeros(())
        batches = micro_batches(work, tokens, step, task.rank, task.dp)
        for number, (inputs, labels) in enumerate(batches, 1):
            if isinstance(parts, DistributedDataParallel):
                # As DDP's no_sync: reduce gradients over the replicas only with the last micro-batch.
                parts.require_backward_grad_sync = number == len(batches)
            loss = parts(inputs, labels) / len(batches)
            loss.backward()
            total += loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        optimizer.zero_grad(set_to_none=task.dp == 1)
        meter.step(total, grad_norm)
    meter.write(torch.__version__)
    if task.dp > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
