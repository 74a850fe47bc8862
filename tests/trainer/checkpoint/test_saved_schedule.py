"""The schedule that a resumed run takes from its checkpoint."""

import pytest

from trainer.checkpoint.directory import CheckpointError
from trainer.checkpoint.metadata import CheckpointMetadata
from trainer.checkpoint.saved_schedule import _changes
from trainer.config.sections.optimizer import OptimizerConfig
from trainer.optimizer.learning_rate import learning_rate, weight_decay


class Config:
    """The section and the length that a schedule follows."""

    def __init__(self, train_iters, **keys):
        self.optimizer = OptimizerConfig(**keys)
        self.full_iters = train_iters


def metadata_of(train_iters, **keys):
    config = {"optimizer": OptimizerConfig(**keys).model_dump(mode="json"), "training": {"train_iters": train_iters}}
    return CheckpointMetadata(
        tensors={},
        progress={},
        config=config,
        vocab_size=8,
        layout={},
        optimizer={"steps": 4},
        loss_scaler=None,
        files=(),
        kernels={},
        checksums={},
    )


@pytest.mark.parametrize(
    "saved",
    [
        {"lr": 1e-3, "lr_decay_style": "cosine", "lr_warmup_fraction": 0.25, "min_lr": 1e-5},
        {"lr": 1e-3, "lr_decay_iters": 12.5, "lr_warmup_iters": 2, "weight_decay": 0.3},
        {"lr": 1e-3, "lr_decay_style": "inverse-square-root", "lr_warmup_iters": 3},
    ],
)
def test_every_step_has_the_rate_and_the_decay_of_the_checkpoint(tmp_path, saved):
    config = Config(30, lr=5e-3, min_lr=1e-4, lr_warmup_fraction=0.1, weight_decay=0.1)
    changed = config.optimizer.model_copy(update=_changes(config, metadata_of(20, **saved), tmp_path))
    before = OptimizerConfig(**saved)
    assert [learning_rate(step, changed, 30) for step in range(30)] == [
        learning_rate(step, before, 20) for step in range(30)
    ]
    assert weight_decay(3, changed, 30) == weight_decay(3, before, 20)


def test_the_same_schedule_changes_nothing(tmp_path):
    keys = {"lr": 1e-3, "lr_warmup_iters": 2, "lr_decay_iters": 10}
    assert _changes(Config(30, **keys), metadata_of(20, **keys), tmp_path) == {}


def test_weight_decay_that_grows_over_another_length_is_refused(tmp_path):
    grows = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.1}
    with pytest.raises(CheckpointError, match="train_iters 30 is not that of .*, 20, over which its weight decay"):
        _changes(Config(30, lr=1e-3), metadata_of(20, lr=1e-3, **grows), tmp_path)


def test_a_checkpoint_without_a_schedule_is_refused(tmp_path):
    metadata = metadata_of(20, lr=1e-3)
    del metadata.config["optimizer"]["lr"]
    with pytest.raises(CheckpointError, match="has no schedule that can be read"):
        _changes(Config(20, lr=1e-3), metadata, tmp_path)
