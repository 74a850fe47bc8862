"""Exit codes of a training run, and the errors whose message is a sentence for the user. Torch-free."""

from __future__ import annotations

from trainer.checkpoint.directory import AnotherModelError, CheckpointError
from trainer.config.errors import ConfigError
from trainer.data.errors import DataError, LostWorkerError
from trainer.process.failure import NodeError
from trainer.process.run_lock import LockedRunError
from trainer.training.soundness.errors import SoundnessError

COMPLETED, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 3, 130


def exit_code_of(error: Exception) -> int:
    """Exit code of a run that ``error`` has ended."""
    is_config = isinstance(error, (ConfigError, DataError, AnotherModelError)) and not isinstance(
        error, LostWorkerError
    )
    return BAD_CONFIG if is_config else FAILED


def is_sentence(error: Exception) -> bool:
    """True if the message says all that a user needs; other errors are shown with their traceback."""
    own = (ConfigError, DataError, CheckpointError, LockedRunError, NodeError, SoundnessError)
    return isinstance(error, own)
