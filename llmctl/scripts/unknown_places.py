"""Flags with a value that only the job knows, and whose value nobody need give: folders of the run, labels of trackers.

llmctl has a place for them: checkpoints and caches of a run go to its directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.scripts.flag_group import UNKNOWN_TEXT, FlagGroup
from llmctl.scripts.shell.values import LEFT_OPEN, Missing
from trainer.config.sections.checkpoint import PARTIAL_STARTS

_JOB_IDS = tuple(
    f"${name}" for name in ("JOB_ID", "SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID", "PJM_JOBID")
)
_OF_THE_JOB = {
    "save": "a folder of the job itself: checkpoints go to the run directory",
    "load": "a folder of the job itself, which is empty at its start: llmctl resume goes on from a run's checkpoints",
}
LABELS = ("wandb", "tensorboard")
"""Beginnings of flags of trackers; a part that only the job knows is left out of such a name."""
_TRACKER_FOLDERS = ("tensorboard-dir", "wandb-save-dir")
_UNKNOWN_LABEL = "a part of its value is known to the job alone; set the key of this flag"
_UNKNOWN_CACHE = "its folder is not known here, so the indices of the data stand beside the data"


@dataclass(frozen=True)
class LeftOut:
    """A flag without its value.

    Attributes:
        shown: words of the flag.
        reason: clause for the config.
        is_told: True if a user hears of it before the job is queued, because checkpoints lie elsewhere.
    """

    shown: str
    reason: str
    is_told: bool = False


def left_out(groups: Sequence[FlagGroup]) -> dict[int, LeftOut]:
    """Place among the flags -> flag that goes without its value."""
    found = {}
    folder = _unknown_folder(groups)
    for place, group in enumerate(groups):
        name = group.name.replace("_", "-")
        if group.missing is None:
            continue
        if group.missing.what in _JOB_IDS and name in _OF_THE_JOB:
            found[place] = LeftOut(" ".join(group.words), _OF_THE_JOB[name])
        elif name.startswith(LABELS) and (name in _TRACKER_FOLDERS or group.words[1:] == (UNKNOWN_TEXT,)):
            found[place] = LeftOut(group.words[0], _UNKNOWN_LABEL)
        elif name == "data-cache-path":
            found[place] = LeftOut(group.words[0], _UNKNOWN_CACHE)
        elif folder and name in ("save", "load") and group.words[1:] == folder:
            found[place] = LeftOut(group.words[0], _unknown_place(group), name == "save")
    return found


def _unknown_folder(groups: Sequence[FlagGroup]) -> tuple[str, ...]:
    """Words of a folder of --save that is unknown; empty if --load names what the training starts from."""
    named = {group.name.replace("_", "-"): group for group in groups}
    save, load = named.get("save"), named.get("load")
    if save is None or save.missing is None or any(key.replace("_", "-") in named for key in PARTIAL_STARTS):
        return ()
    is_start = load is not None and (load.words[1:] != save.words[1:] or not _same(load.missing, save.missing))
    return () if is_start else save.words[1:]


def _same(one: Missing | None, other: Missing) -> bool:
    """True if two unknown parts stand for one text: the same part, or the same place that the script leaves open."""
    return one == other or (one is not None and one.why == other.why == LEFT_OPEN and one.what == other.what)


def _unknown_place(group: FlagGroup) -> str:
    missing = group.missing
    if group.name == "load" or missing is None:
        return "the folder of --save, which is not known here: llmctl resume goes on from a run's checkpoints"
    remedy = f"; give --arg {missing.name}=VALUE for another place" if missing.name else ""
    return f"{missing.what} {missing.why}, so checkpoints go to the run directory{remedy}"
