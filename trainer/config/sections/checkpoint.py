"""Section ``checkpoint``: saving and loading."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from trainer.config.sections.section import Section

PARTIAL_STARTS = ("finetune", "no_load_optim", "no_load_rng")
"""Keys by which a run takes less than everything from ``load``."""

START_REMEDY = (
    "correct the path, or unset the key (checkpoint.load=null) to start with new weights, as Megatron-LM would without "
    "--exit-on-missing-checkpoint"
)
"""Advice for a start point without a checkpoint. A wrong path must not train a new model unnoticed."""


def folder_apart(save: str, key: str) -> str:
    """A folder beside ``save`` for the checkpoints of a run that starts from ``save`` by a key of PARTIAL_STARTS."""
    return f"{save.rstrip('/')}-{'finetuned' if key == 'finetune' else 'continued'}"


class CheckpointConfig(Section):
    """Saving and loading of checkpoints."""

    save: str | None = None
    """Folder for checkpoints. Unset: ``checkpoints`` in the run directory; without a run directory nothing is saved."""
    load: str | None = None
    """Folder of the checkpoint to start from: the latest one in it. A Hugging Face folder, a GGUF file, or a folder
    that ``llmctl checkpoint import`` has made, gives only the weights: training starts at iteration 0. Ignored if
    ``save`` already holds a checkpoint of this run. The folder of ``save`` itself means, as in Megatron-LM: go on from
    its latest checkpoint, or start with new weights while it holds none."""
    save_interval: PositiveInt | None = None
    """Iterations between checkpoints. Unset: save only at the end."""
    keep_last: PositiveInt | None = None
    """Delete what is older than the newest N undamaged checkpoints. Unset: keep all."""
    verify_after_save: Literal["sample", "all", "off"] = "sample"
    """Part of each file that is read back and compared before a checkpoint is complete and ``keep_last`` deletes older
    ones. sample: the first and the last 4 MiB, and every 16th between them."""
    async_save: bool = False
    """Write checkpoints beside the next iterations. Each rank first copies what it writes to host memory, as many bytes
    as its part of the checkpoint, beside the next forward and backward pass. Training waits before its next update if
    these copies are not made, and for a save that is still being written when the next one is due. The last save, and
    that of a stop request, are complete before the run ends."""
    copy_interval: PositiveInt | None = None
    """Iterations between copies of the whole state in ``copy_folder``: an attempt that begins again in its job goes on
    from them if they are newer than the newest checkpoint. Unset: no copies."""
    copy_folder: str | None = None
    """Folder for copies, of each node its own: in its memory, such as /dev/shm, or on its disk. With several nodes each
    also keeps the copies of its neighbour."""
    max_missed_saves: PositiveInt | None = 3
    """End the run when the disk has refused this many saves in a row (full, quota, mount gone) and missed_saves_grace_s
    has passed. null: no limit. The run goes on after fewer. The save at its end must succeed."""
    missed_saves_grace_s: NonNegativeFloat = 600.0
    """Time from the first missed save in a row before which max_missed_saves does not end the run: somebody may be
    making room."""
    wait_for_folder_s: NonNegativeFloat = 60.0
    """Seconds to wait at the start for the folder of checkpoints, if the run has saved checkpoints and the folder is
    missing or holds none on a node: a mount may be slow to come. Then the run fails; it never starts from scratch."""
    exit_on_missing_checkpoint: bool = False
    """Refuse a ``load`` that is also ``save`` and holds no checkpoint, instead of starting with new weights. A ``load``
    that is not also ``save`` must always hold one. Without ``load`` there is nothing to miss."""
    finetune: bool = False
    """Load only the weights from ``load``; iteration, optimizer, data position and RNG state start afresh."""
    draw_missing_heads: bool = False
    """Start from a Hugging Face folder of a bare encoder, and draw the heads that it lacks anew (BERT)."""
    no_load_optim: bool = False
    """Start with a new optimizer state instead of that of the checkpoint."""
    no_load_rng: bool = False
    """Start with new states of the random numbers instead of those of the checkpoint."""
    no_save_optim: bool = False
    """Leave the optimizer state out of checkpoints, which are then for use, not for an exact resume."""
    save_hugging_face: bool = False
    """After each save, write the same weights as a Hugging Face folder, ``iter_N_hugging_face`` beside the checkpoint
    ``iter_N``. ``keep_last`` deletes both together."""

    @property
    def part_left_out(self) -> str | None:
        """The key by which the run takes less than everything from ``load``; None without one."""
        return next((key for key in PARTIAL_STARTS if getattr(self, key)), None)
