"""Disk room of the checkpoints that a run is going to save."""

from llmctl.submit.preview.place import counted
from trainer.config.train_config import TrainConfig
from trainer.planning.estimate.devices import GIB

_WEIGHT = 4
"""Bytes per parameter of a checkpoint's weights, in float32."""


def checkpoints_text(config: TrainConfig, parameters: int, free_bytes: int) -> str:
    """Number and size of the checkpoints beside the free space; and what to do if they do not fit.

    Args:
        config: of the run.
        parameters: of the whole model.
        free_bytes: on the file system of the checkpoints.
    """
    number = checkpoints_kept(config)
    optimizer = config.optimizer
    moments = 0 if config.checkpoint.no_save_optim else sum(map(optimizer.moment_bytes, optimizer.moments))
    each = parameters * (_WEIGHT + moments)
    if config.checkpoint.save_hugging_face:
        each += parameters * (2 if config.training.bf16 or config.training.fp16 else 4)
    total = number * each
    count = f"{counted(number, 'checkpoint')} of"
    text = f"{count} {each / GIB:.2g} GiB" + (f" = {total / GIB:,.3g} GiB" if number > 1 else "")
    free = f"{free_bytes / GIB:,.3g} GiB are free"
    if total <= free_bytes:
        return f"{text}; {free}"
    most = free_bytes // each - 1
    cure = f"; checkpoint.keep_last={most} keeps fewer" if most >= 1 else ""
    return f"{text}, but only {free}{cure}"


def checkpoints_kept(config: TrainConfig) -> int:
    """Most checkpoints that are on the disk at a time; an old one goes only once a new one is complete."""
    interval, length = config.checkpoint.save_interval, config.training.train_iters
    saved = 1 if interval is None else max(1, -(-length // interval))
    kept = config.checkpoint.keep_last
    return saved if kept is None else min(saved, kept + 1)
