"""Output layer and loss in chunks: the numbers of the loss of whole logits, which are never held."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainer.model import recompute_case
from tests.trainer.model.recompute_case import GPT2, LLAMA, batch, make_config
from trainer.config.sections.model import ModelConfig
from trainer.data.samples.further_tokens import with_further_tokens
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.distributed.random_streams import StepRandomness
from trainer.model.head import GPTHead
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.ops.dispatch.registry import Kernels
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward

VOCAB_SIZE, PADDED, WIDTH, LENGTH, SAMPLES = 29, 32, 8, 8, 3
FORMS = {
    "plain": {},
    "z-loss": {"z_loss_coeff": 0.01},
    "capped": {"final_logit_softcapping": 2.0, "logits_scaling": 1.5},
}


def squared_error(logits, labels):
    """A loss of the user's own."""
    return (logits.float() - nn.functional.one_hot(labels, logits.shape[-1])).square().sum(-1)


def of_head(rank, world_size, sp, form, token_loss, chunk_size):
    """Loss, and gradients of the input, of this rank's rows of the table and of the bias; with and without a chunk."""
    tp = TensorParallel(world_size, rank, dist.group.WORLD if world_size > 1 else None, sp)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(LENGTH, SAMPLES, WIDTH, generator=generator)
    table, bias = torch.randn(PADDED, WIDTH, generator=generator), torch.randn(PADDED, generator=generator)
    labels = torch.randint(0, VOCAB_SIZE, (SAMPLES, LENGTH), generator=generator)
    mask = (torch.rand((SAMPLES, LENGTH), generator=generator) < 0.5).float()
    own = slice(rank * PADDED // world_size, (rank + 1) * PADDED // world_size)
    model = ModelConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, **FORMS[form])
    head = GPTHead(
        model, nn.Parameter(table[own].clone()), VOCAB_SIZE, SimpleNamespace(kernels=Kernels()), tp, token_loss,
        chunk_size,
    )  # fmt: skip
    head.output.bias = nn.Parameter(bias[own].clone())
    inputs = tp.sequence_shard(hidden).clone().requires_grad_()
    loss = head(inputs, MicroBatch(labels, labels, mask))
    (loss * 0.3).backward()
    return loss.detach(), inputs.grad, head.output.weight.grad, head.output.bias.grad


@pytest.mark.parametrize(("world_size", "sp"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("token_loss", [None, squared_error], ids=["cross-entropy", "own"])
def test_equals_the_loss_of_whole_logits(ranks, world_size, sp, form, token_loss):
    whole = ranks.run(of_head, sp, form, token_loss, None, world_size=world_size)
    for chunk_size in (1, 7, 24, 100):
        found = ranks.run(of_head, sp, form, token_loss, chunk_size, world_size=world_size)
        for one, other in zip(found, whole, strict=True):
            for mine, expected in zip(one, other, strict=True):
                torch.testing.assert_close(mine, expected, rtol=2e-6, atol=2e-6)


# No other tensor is 112 wide.
WIDE = {"make_vocab_size_divisible_by": 56}
MODELS = {
    "llama": {**LLAMA, **WIDE},
    "tied": {**GPT2, **WIDE},
    "depths": {**LLAMA, **WIDE, "mtp_num_layers": 2, "untie_embeddings_and_output_weights": False},
}
TOKENS, CHUNK_SIZE = 32, 5


class _WidestLogits(TorchDispatchMode):
    """Counts the most rows of a tensor as wide as the logits; a transposed table is as wide, too."""

    def __init__(self, width):
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        results = function(*arguments, **(keywords or {}))
        for tensor in () if function is torch.ops.aten.t.default else tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == self.width:
                self.rows = max(self.rows, tensor.numel() // self.width)
        return results


def of_model(model, training):
    """Loss and gradients of two micro-batches, and the most rows of logits that are held at once."""
    config = make_config(model, training)
    mesh = ParallelMesh.build(config, 0, 1)
    built = build_model(config, recompute_case.VOCAB_SIZE, mesh, ProcessGroups(), torch.device("cpu"))
    batches = [with_further_tokens(batch(index), config.model.mtp_num_layers) for index in range(2)]
    with _WidestLogits(config.model.padded_vocab_size(recompute_case.VOCAB_SIZE, 1)) as widest:
        loss = forward_backward(
            built, batches, valid_tokens=2 * TOKENS, loss_scale=1.0, randomness=StepRandomness(1, 0)
        )
    return loss, {name: built.gradients.main_grad(name).clone() for name in built.parameters}, widest.rows


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "slack"), [("fp32", 2e-6), ("bf16", 0.02)])
def test_a_model_trains_alike_and_never_holds_all_logits(model, dtype, slack):
    """Whole micro-batches, a tied table, prediction layers; gradients go to the main gradients."""
    precision = {"bf16": dtype == "bf16"}
    chunks = {"cross_entropy_fusion_impl": "linear", "loss_chunk_size": CHUNK_SIZE}
    loss, gradients, rows = of_model(MODELS[model], precision)
    chunked, found, few = of_model(MODELS[model], {**precision, **chunks})
    assert (rows, few) == (TOKENS, CHUNK_SIZE)
    torch.testing.assert_close(chunked, loss, rtol=slack, atol=0)
    for name, expected in gradients.items():
        assert (found[name] - expected).norm() <= slack * expected.norm(), name
