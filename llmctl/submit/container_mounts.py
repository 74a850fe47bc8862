"""Folders that a job's container must mount. Pure."""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from llmctl.site.container import on_host
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile
from trainer.config.train_config import TrainConfig


def own_mounts(
    spec: JobSpec, profile: ClusterProfile, config: TrainConfig | None, run_dir: Path, working_dir: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All folders that the job uses and no mount of profile or user shows; and the written folders among them.

    Args:
        spec: the user's job.
        profile: of the cluster.
        config: of a training run; None for a COMMAND.
        run_dir: of the run.
        working_dir: of a COMMAND.
    """
    shown = (*profile.container.mounts, *spec.mounts)
    written, read = _used_by(config) if config is not None else ([], [])
    written = _unshown(written, shown)
    shown_already = (str(run_dir), profile.container.workdir)  # workdir is a folder of the image, or in a mount
    places = [working_dir] if spec.command and str(working_dir) not in shown_already else []
    # The folder of the runs: the run's code, caches and secrets lie beside the run.
    needed = (str(run_dir.parent), *written, *_unshown(read, shown), *map(str, places))
    return tuple(dict.fromkeys(needed)), tuple(written)


def _used_by(config: TrainConfig) -> tuple[list[str], list[str]]:
    """Folders that a training run writes, and folders that it reads."""
    files = [*config.data_prefixes(), *config.read_paths()]
    # checkpoint.load is a folder itself.
    read = [path if key == "checkpoint.load" else str(PurePosixPath(path).parent) for key, path in files]
    if config.checkpoint.copy_folder is not None:
        # A container's own would be gone with it when the run begins again.
        read.append(config.checkpoint.copy_folder)
    return [path for _, path in config.written_paths()], read


def _unshown(paths: Iterable[str], mounts: tuple[str, ...]) -> list[str]:
    """Paths that no mount covers yet."""
    return [path for path in paths if on_host(path, mounts) is None]
