"""Names in a checkpoint folder, and publication that survives a kill. Torch-free.

A checkpoint is complete when its folder has its final name: its files are on the disk before the rename, and the
rename is on the disk before ``latest_checkpointed_iteration.txt`` names it (POSIX rename(2) is atomic).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from itertools import islice
from pathlib import Path

from trainer.checkpoint.checksums import is_metadata_sound
from trainer.checkpoint.foreign import describe_foreign
from trainer.process.run_directory import sync_directory

LATEST = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
CONVERSION = "conversion.json"
"""In the unfinished folder of an import: a description of the source."""
IMPORT_ATTEMPT = 0
"""Marks what an import moves aside."""

_COMPLETE = re.compile(r"iter_(\d{7,})")
_LEFTOVER = re.compile(r"\.iter_\d{7,}(_hugging_face)?\.((tmp|old)-\d+|unfinished)|\.latest-\d+")
_ASIDE = re.compile(r"\.(iter_\d{7,})\.old-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read.

    The message is one sentence that names the folder.
    """


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's files are not those that were written; an older checkpoint may be sound.

    The message names the file.
    """


class AnotherModelError(CheckpointError):
    """An undamaged checkpoint has another model or optimizer than the config.

    This is a mistake in the config.
    """


class ForeignFormatError(AnotherModelError):
    """A folder holds a model in another program's format. This is a mistake in the config."""


def checkpoint_path(root: Path, iteration: int) -> Path:
    """Folder of the complete checkpoint of an iteration."""
    return root / f"iter_{iteration:07d}"


def hub_path(root: Path, iteration: int) -> Path:
    """Hugging Face folder beside the checkpoint of an iteration, with the same weights."""
    return root / f"iter_{iteration:07d}_hugging_face"


def temporary_path(root: Path, iteration: int, attempt: int) -> Path:
    """Folder in which an attempt writes the checkpoint of an iteration."""
    return root / f".iter_{iteration:07d}.tmp-{attempt}"


def import_path(root: Path) -> Path:
    """Folder in which an import writes: it has one writer, and goes on where the last one ended."""
    return temporary_path(root, 0, IMPORT_ATTEMPT)


def unfinished_import(root: Path) -> str | None:
    """Source of an import into ``root`` that has not ended; None if there is none."""
    try:
        description = json.loads((import_path(root) / CONVERSION).read_text(encoding="utf-8"))
        source = json.loads(description)[0]
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return source if isinstance(source, str) else None


def complete_iterations(root: Path) -> list[int]:
    """Iterations with a complete checkpoint, ascending. Includes checkpoints that were damaged afterwards."""
    if not root.is_dir():
        return []
    matches = ((entry, _COMPLETE.fullmatch(entry.name)) for entry in root.iterdir())
    return sorted(int(match[1]) for entry, match in matches if match and entry.is_dir())


def holds_checkpoints(root: Path) -> bool:
    """True if a checkpoint, damaged or moved aside, or the pointer to one is in the folder."""
    return any(
        name == LATEST or _COMPLETE.fullmatch(name) or _ASIDE.fullmatch(name)
        for name in (entry.name for entry in root.iterdir())
    )


def damage(checkpoint: Path) -> str | None:
    """Damage of a checkpoint; None if it is undamaged.

    Compares the metadata with its own checksum and with the sizes of the files, which it does not read.
    """
    if not checkpoint.is_dir():
        return "is missing"
    try:
        values = json.loads((checkpoint / METADATA).read_text(encoding="utf-8"))
        if not is_metadata_sound(values):
            return f"is damaged ({METADATA} has altered bytes)"
        files = values["files"]
        wrong = next((name for name, size in files.items() if (checkpoint / name).stat().st_size != size), None)
    except OSError as error:
        return f"is damaged ({type(error).__name__}: {error})"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"is damaged ({METADATA} has altered bytes, {type(error).__name__}: {error})"
    return None if wrong is None else f"is damaged ({wrong} has a wrong size)"


def find_latest(root: Path, rejected: Collection[Path] = ()) -> tuple[Path | None, str | None]:
    """The checkpoint to resume from, and a warning if it is unexpected.

    The choice is the checkpoint that latest_checkpointed_iteration.txt names; if it is missing or damaged, the newest
    undamaged one before it. Later ones belong to a branch that the user left by setting the pointer back. Without a
    readable pointer the newest of all counts.

    Args:
        root: folder of checkpoints.
        rejected: checkpoints in it whose contents have turned out to be damaged.

    Raises:
        ForeignFormatError: the checkpoints are those of another program.
        CheckpointError: all checkpoints are damaged, or all up to the named one.
    """
    complete = complete_iterations(root)
    named = _named_iteration(root)
    if named is not None:
        path = checkpoint_path(root, named)
        problem = "is damaged" if path in rejected else damage(path)
        if problem is None:
            return path, None
        what = f"checkpoint {path}, which {LATEST} names, {problem}"
    elif complete:
        what = f"{root / LATEST} names no iteration"
    else:
        return None, None
    # Only before the named one: whoever set the pointer back has left the later branch on purpose.
    later = []
    for iteration in reversed(complete):
        path = checkpoint_path(root, iteration)
        if path in rejected or damage(path) is not None:
            continue
        if named is None or iteration <= named:
            before = "" if named is None else " before it"
            return path, f"{what}; resuming from {path.name}, the newest undamaged checkpoint{before}"
        later.append(path.name)
    if later:
        raise CheckpointError(
            f"{what}, and {root} holds no undamaged checkpoint before it; restore one, or write the iteration of a "
            f"later one into {LATEST} ({', '.join(reversed(later))})"
        )
    foreign = describe_foreign(root)
    if foreign is not None:
        raise ForeignFormatError(f"{root} {foreign}")
    raise CheckpointError(
        f"{what}, and {root} holds no undamaged checkpoint; restore one, or start a new run with another folder"
    )


def _named_iteration(root: Path) -> int | None:
    try:
        text = (root / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


def _always_may_write() -> None:
    """Check nothing: for a writer without a lock."""


def publish(
    temporary: Path, root: Path, iteration: int, attempt: int, check: Callable[[], None] = _always_may_write
) -> None:
    """Give a written and synced folder its final name, then update the pointer.

    A checkpoint of the same iteration, from a run that resumed from an older one, is moved aside first; after a kill
    at this point, remove_leftovers restores it. The Hugging Face folder of the older weights is deleted.

    A writer that has lost the run to another publishes nothing after that other has called remove_leftovers: ``check``
    refuses, or if the writer stood still just after it, what it is about to rename is gone.

    Args:
        temporary: the folder.
        root: folder of checkpoints.
        iteration: of the checkpoint.
        attempt: marks what is moved aside; no two writers have the same.
        check: raises an error if another process writes here now. Called directly before each rename.

    Raises:
        OSError: the file system refuses; older checkpoints are untouched.
    """
    final = checkpoint_path(root, iteration)
    aside = root / f".{final.name}.old-{attempt}"
    check()
    _remove_hub_folder(root, iteration, attempt)
    check()
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if aside.exists():
            aside.rename(final)
        raise
    sync_directory(root)
    _write_pointer(root, iteration, attempt, check)
    shutil.rmtree(aside, ignore_errors=True)


def _write_pointer(root: Path, iteration: int, attempt: int, check: Callable[[], None]) -> None:
    temporary = root / f".latest-{attempt}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(f"{iteration}\n")
        file.flush()
        os.fsync(file.fileno())
    check()
    temporary.replace(root / LATEST)
    sync_directory(root)


def prune(root: Path, keep_last: int, iteration: int, attempt: int) -> None:
    """Delete what is older than the newest ``keep_last`` undamaged checkpoints up to ``iteration``.

    Each goes with its Hugging Face folder. A checkpoint counts as damaged if ``damage`` says so: its metadata is
    altered, or a file is missing or has another size. Altered bytes in its other files are not looked for here, since
    every save would have to read all of them. Nothing is deleted while there are fewer undamaged ones; damaged ones
    between them stay, for a repair by hand.

    Later checkpoints are kept: the user left them behind by setting the pointer to an older one. Each folder is renamed
    before its files are deleted, so that no half-deleted folder has the name of a complete one.
    """
    numbers = [number for number in complete_iterations(root) if number <= iteration]
    undamaged = (number for number in reversed(numbers) if damage(checkpoint_path(root, number)) is None)
    oldest_kept = next(islice(undamaged, keep_last - 1, None), 0)
    for old in [number for number in numbers if number < oldest_kept]:
        _remove_hub_folder(root, old, attempt)
        aside = root / f".{checkpoint_path(root, old).name}.old-{attempt}"
        checkpoint_path(root, old).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _remove_hub_folder(root: Path, iteration: int, attempt: int) -> None:
    folder = hub_path(root, iteration)
    if folder.exists():
        aside = root / f".{folder.name}.old-{attempt}"
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(root: Path) -> list[str]:
    """Remove files that dead attempts left half-written or half-deleted; returns the names.

    No other attempt may be running. An undamaged checkpoint that was moved aside for a new one of its iteration gets
    its name back if the new one was never published.
    """
    if not root.is_dir():
        return []
    _put_back(root)
    names = sorted(entry.name for entry in root.iterdir() if _LEFTOVER.fullmatch(entry.name))
    for name in names:
        if (root / name).is_dir():
            shutil.rmtree(root / name, ignore_errors=True)
        else:
            (root / name).unlink(missing_ok=True)
    return names


def _put_back(root: Path) -> None:
    matches = [match for entry in root.iterdir() if (match := _ASIDE.fullmatch(entry.name))]
    # The newest attempt's first. A folder that a dead attempt was deleting lacks files, or may be restored as well.
    for match in sorted(matches, key=lambda match: int(match[2]), reverse=True):
        aside, final = root / match[0], root / match[1]
        if not final.exists() and damage(aside) is None:
            aside.rename(final)


def is_own_checkpoint(restored: Path | None, save: Path | None) -> bool:
    """True if a run continues one of its own checkpoints, not a folder of weights that lies beside them."""
    return restored is not None and restored.parent == save and restored.name.startswith("iter_")
