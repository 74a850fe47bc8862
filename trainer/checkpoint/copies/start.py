"""The start of an attempt: from the copies of the run's newest state, or from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer.checkpoint.copies.restoring import Limits, restore_from_copies
from trainer.checkpoint.copies.state_copies import StateCopies
from trainer.checkpoint.directory import CheckpointError, checkpoint_path, find_latest, is_own_checkpoint
from trainer.checkpoint.resume import restore
from trainer.distributed.collectives import first_text, from_first_rank

if TYPE_CHECKING:
    from trainer.config.records.saved_progress import SavedProgress
    from trainer.config.train_config import TrainConfig
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel
    from trainer.process.progress import TrainingProgress
    from trainer.process.run_directory import RunDirectory

_SOUNDNESS = "trainer.training.soundness"
"""Room of the errors after which the newest weights may be bad, or must not be gone on from."""
_OF_STATE = ("error", "unknown")
"""Classes of failures (llmctl/supervisor/restarts.py) that a state may bring about."""


class Start(NamedTuple):
    """The place from which an attempt goes on.

    Attributes:
        checkpoint: loaded, or with ``copies`` the run's newest one; None without one.
        copies: folder of the copies whose state was taken; None: the state is that of ``checkpoint``.
    """

    checkpoint: Path | None
    copies: Path | None = None

    @property
    def place(self) -> Path | None:
        """The folder of the state; None without one."""
        return self.copies or self.checkpoint

    def saved_iteration(self, save: Path | None) -> int | None:
        """Iteration of the checkpoint of this run's own; None without one."""
        is_own = is_own_checkpoint(self.checkpoint, save)
        return int(self.checkpoint.name.removeprefix("iter_")) if is_own and self.checkpoint is not None else None


def restore_newest(
    copies: StateCopies | None,
    run: RunDirectory | None,
    config: TrainConfig,
    save: Path | None,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer,
    progress: TrainingProgress,
    device: torch.device,
    kernels: Mapping[str, str] | None = None,
    saved: SavedProgress | None = None,
) -> Start:
    """Go on from copies that are newer than the newest checkpoint, or else as ``restore``. Collective: all ranks.

    Rank 0 tells which and why; copies that were not taken are deleted.

    Args:
        copies: of this rank; None without checkpoint.copy_interval.
        run: directory of the run.
        config: see restore, for this and all others.
        save: see restore.
        model: see restore.
        optimizer: see restore.
        progress: see restore.
        device: see restore.
        kernels: see restore.
        saved: see restore.

    Raises: see restore.
    """
    if copies is not None and run is not None:
        taken = _take(copies, run, config, save, model, optimizer, progress, saved) if run.attempt > 1 else None
        if taken is not None:
            return taken
        copies.keep_only(None)
    return Start(restore(config, save, model, optimizer, progress, device, kernels, saved))


def _take(
    copies: StateCopies,
    run: RunDirectory,
    config: TrainConfig,
    save: Path | None,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer,
    progress: TrainingProgress,
    saved: SavedProgress | None,
) -> Start | None:
    """Go on from the copies, if they may be used and are sound; on rank 0 tell of it. Collective: all ranks."""
    is_first, cpu = model.mesh.rank == 0, torch.device("cpu")
    newest, refusal, limits = None, "", Limits(0, 0)
    if is_first:
        newest, refusal = _newest_checkpoint(config, save, saved)
        first, reason = first_attempt(run)
        refusal = refusal or (reason if first == run.attempt else "")
        limits = Limits(newest or 0, first)
    refusal = first_text(refusal, cpu, copies.group)
    numbers = from_first_rank([*limits, newest if newest is not None else -1], cpu, copies.group)
    choice, told = None, [refusal]
    if not refusal:
        choice, told = restore_from_copies(copies, Limits(*numbers[:2]), model, optimizer, progress)
    checkpoint = checkpoint_path(save, numbers[2]) if save is not None and numbers[2] >= 0 else None
    words = f"the newest checkpoint is {f'that of iteration {numbers[2]}' if checkpoint is not None else 'none'}"
    if choice is not None:
        lines = [*told, f"goes on from the copies of iteration {choice.iteration} in {copies.parent}; {words}"]
        copies.keep_only(choice.iteration, choice.attempt)
    else:
        reason = (told or [""])[-1] or "none is newer than the newest checkpoint"
        lines = [*told[:-1], f"goes on from no copy in {copies.parent}: {reason}; {words}"]
    if is_first:
        print("\n".join(lines), flush=True)
    return Start(checkpoint, copies.parent) if choice is not None else None


def _newest_checkpoint(config: TrainConfig, save: Path | None, saved: SavedProgress | None) -> tuple[int | None, str]:
    """Iteration of the checkpoint that ``restore`` would take, None without one; and why no copy may be used."""
    path = None
    try:
        path = find_latest(save)[0] if save is not None else None
    except (CheckpointError, OSError) as error:
        # The restore tells more.
        return None, f"the newest checkpoint cannot be read ({error})"
    newest = int(path.name.removeprefix("iter_")) if path is not None else None
    if saved is not None and (newest or 0) < saved.iteration:
        return newest, f"the run has saved iteration {saved.iteration}, and must go on from an earlier one"
    if newest is None and config.optimizer.use_checkpoint_opt_param_scheduler:
        return None, "the schedule of checkpoint.load must be followed"
    return newest, ""


def first_attempt(run: RunDirectory) -> tuple[int, str]:
    """The first attempt whose copies may be used, and the reason why those before may not.

    It belongs to the present submission, and none since has ended because losses or weights were not sound. After an
    error at the same steps as before no copy may be used: its state may be at fault.
    """
    last, submission = run.attempt - 1, submission_of(run, run.attempt)
    if _repeats_error(run, last):
        return run.attempt, f"attempt {last} has met an error and gone no further than those before"
    for number in range(last, 0, -1):
        if submission_of(run, number) != submission:
            return number + 1, f"attempt {number} is of another submission"
        if _is_unsound(_folder(run, number)):
            return number + 1, f"attempt {number} has ended by losses or weights that are not sound"
    return 1, ""


def submission_of(run: RunDirectory, attempt: int) -> int:
    """Number of the job of an attempt, by the record of its supervisor; 0 without one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(_values(_folder(run, attempt) / "started.json")["submission"])
    return 0


def _repeats_error(run: RunDirectory, last: int) -> bool:
    """True if the attempt ``last`` has ended by an error, and no step is new in it, by its supervisor's record."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        ending = _values(_folder(run, last) / "exit.json")
        before = [_values(_folder(run, number) / "exit.json")["trained"] for number in range(1, last)]
        return bool(before) and ending["class"] in _OF_STATE and ending["trained"] <= max(before)
    return False


def _is_unsound(folder: Path) -> bool:
    """True if a rank of an attempt reports such an error."""
    for path in folder.glob("errors/rank-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if str(_values(path)["module"]).startswith(_SOUNDNESS):
                return True
    return False


def _folder(run: RunDirectory, attempt: int) -> Path:
    return run.path / "attempts" / str(attempt)


def _values(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values
