"""One rank of a larger job, in this process and without the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.config.train_config import TrainConfig
from trainer.distributed.mesh import ParallelMesh, ProcessGroups, build_process_groups
from trainer.planning.build_config import build_config


def config_of(model: dict, parallel: dict, **training: object) -> TrainConfig:
    """A config whose global batch divides over up to 4, 8 and 16 ranks."""
    return build_config(
        {
            "model": model,
            "parallel": parallel,
            "training": {"train_iters": 1, "seq_length": 64, "global_batch_size": 48, **training},
            "optimizer": {"lr": 1e-3},
        }
    )


@contextmanager
def lone_rank(config: TrainConfig, rank: int, world_size: int) -> Iterator[tuple[ParallelMesh, ProcessGroups]]:
    """Place and groups of ``rank``, whose collectives return at once without data."""
    mesh = ParallelMesh.build(config, rank, world_size)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield mesh, build_process_groups(mesh, timedelta(seconds=60))
    finally:
        dist.destroy_process_group()
