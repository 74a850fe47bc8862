"""Traces a step of ranks of some layouts on a CUDA device that is not there; prints the records as JSON.

LD_PRELOAD=fake_cuda.so python -m tests.trainer.traces.trace <layouts.json
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.trainer.traces import fake_streams
from tests.trainer.traces.layouts import MICRO_BATCHES, VOCAB_SIZE
from tests.trainer.traces.recorder import CUDA, Memory, Record, Recorder
from trainer import parallel_model
from trainer.config.train_config import TrainConfig
from trainer.data.samples.document_places import Documents
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.ops.build.build_settings import BuildSettings, LineReport
from trainer.ops.dispatch.library import load_on_demand
from trainer.ops.dispatch.registry import OPERATIONS, Kernels
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.pipeline.executor import forward_backward
from trainer.planning.build_config import build_config
from trainer.planning.kernel_choice import requested_backends

HOPPER = (9, 0)


class _Attention(torch.autograd.Function):
    """Attention of cuDNN: keeps its inputs, its output, and a float32 per head and query."""

    @staticmethod
    def forward(ctx, query, key, value):
        output = torch.zeros_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx, _):
        query, key, value, *_ = ctx.saved_tensors
        return torch.zeros_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(query, key, value, **_):
    return _Attention.apply(query, key, value)


@contextmanager
def a_fake_device(rank: int, world_size: int):
    """The device and the process group of one rank, neither of which does anything."""
    torch.cuda.get_device_capability = lambda *_: HOPPER
    F.scaled_dot_product_attention = _attention
    # Threads draw the weights, and only one may use fake tensors.
    parallel_model._fill = lambda *_: None
    torch.random.fork_rng = lambda *_, **__: nullcontext()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def micro_batch(config: TrainConfig, kind: str, index: int) -> MicroBatch:
    """Tokens on the device: plain, in documents, or of BERT with padding and parts."""
    length = config.training.seq_length
    tokens = torch.zeros((1, length), dtype=torch.int64, device=CUDA)
    if kind == "documents":
        documents = Documents([(0, length // 4, length)])
        documents.positions(torch.device("cpu"))
        return MicroBatch(tokens, tokens, index=index, documents=documents, restarts=documents)
    if kind == "bert":
        return MicroBatch(
            tokens, tokens, tokens.bool(), index, padding_mask=tokens.bool(), token_types=tokens,
            sample_labels=tokens[:, 0].clone(),
        )  # fmt: skip
    return MicroBatch(tokens, tokens, index=index)


def trace(values: dict, kind: str, rank: int, world_size: int) -> Record:
    """One step of one rank: forward and backward of all micro-batches, and the optimizer's step."""
    config = build_config(values)
    asked = {name: one.backend for name, one in requested_backends(config).items() if one.backend != "auto"}
    kernels = Kernels(**{one.name: one.function(asked.get(one.name, "native"), "cuda") for one in OPERATIONS})
    memory = Memory()
    with a_fake_device(rank, world_size), memory.following_sizes():
        mesh = ParallelMesh.build(config, rank, world_size)
        groups = build_process_groups(mesh, timedelta(minutes=1))
        with FakeTensorMode(allow_non_fake_inputs=True):
            with Recorder(memory):
                model = parallel_model.build_model(
                    config, config.model.vocab_size or VOCAB_SIZE, mesh, groups, CUDA, kernels
                )
                optimizer = MixedPrecisionOptimizer(config, model)
                batches = [micro_batch(config, kind, index) for index in range(MICRO_BATCHES)]
            with Recorder(memory) as recorder:
                recorder.record.before = memory.now
                labels = 64 if kind != "bert" else [64, 8]
                randomness = StepRandomness(1, iteration=0)
                forward_backward(model, batches, valid_tokens=labels, loss_scale=1.0, randomness=randomness)
                optimizer.launch(1e-4)
                recorder.record.peak = memory.peak
    return recorder.record


def main() -> None:
    """Trace layouts: name -> values, kind of batch, world_size and ranks."""
    os.environ.pop("LD_PRELOAD")  # of this process, not of a compiler
    fake_streams.set_up()
    load_on_demand(BuildSettings.from_variables(os.environ), LineReport())
    found = {}
    for name, one in json.load(sys.stdin).items():
        records = {rank: trace(one["values"], one["kind"], rank, one["world_size"]) for rank in one["ranks"]}
        found[name] = {rank: _document(record) for rank, record in records.items()}
    print(json.dumps(found))


def _document(record: Record) -> dict[str, object]:
    return {**vars(record), "collectives": [*record.collectives.items()]}


if __name__ == "__main__":
    main()
