"""Whether a job's container can be started as it is asked for, by the rules of what starts it. Pure.

Mounts and images by pyxis 0.24 (https://github.com/NVIDIA/pyxis, args.c) and apptainer exec
(https://apptainer.org/docs/user/main/cli/apptainer_exec.html).
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from llmctl.errors import UsageError
from llmctl.paths import UserFolders
from llmctl.site.container import is_file
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile
from llmctl.submit.request import launcher_of
from llmctl.submit.resolve import Resolved

_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+#-]*")
"""[USER@][REGISTRY#]IMAGE[:TAG]; the # is pyxis' and enroot's, between registry and image."""
_FLAGS = re.compile(r"[A-Za-z0-9_=+-]+")


def check_container(resolved: Resolved, job: JobSpec, profile: ClusterProfile, folders: UserFolders) -> None:
    """Refuse an image or a mount that the site cannot start, before the job waits in a queue for it.

    Raises:
        UsageError, ConfigFileError: names what is wrong, and what is valid.
    """
    software, runtime = profile.environment, profile.container.runtime
    image = job.container or (software.path if software.kind == "container" else None)
    if image is None:
        if job.mounts:
            raise resolved.refusal(
                "job.mounts", f"{job.mounts[0]} means nothing without an image; give --container IMAGE too"
            )
        return
    key = "job.container" if job.container else "job.mounts"
    if runtime is None:
        raise resolved.refusal(
            "job.container",
            f"{image}: {profile.name} names nothing that runs containers; leave the image out, or set "
            f"container.runtime (pyxis, enroot, apptainer, singularity) in {folders.clusters / profile.name}.yaml",
        )
    if runtime == "pyxis" and launcher_of(job, profile) == "mpirun":
        raise resolved.refusal(
            "job.launcher",
            "mpirun starts its ranks outside the container of pyxis; use torchrun, or srun, which takes --mpi=pmix in "
            "launch.srun_options of the profile",
        )
    if runtime == "pyxis" and profile.container.save is not None and job.nodes > 1:
        raise resolved.refusal(
            "job.nodes",
            f"{profile.name} keeps the container's end state in {profile.container.save} (container.save), and "
            f"{job.nodes} nodes would write over each other's; use one node, or unset container.save in "
            f"{folders.clusters / profile.name}.yaml",
        )
    _check_image(resolved, image)
    for mount in job.mounts:
        problem = _pyxis_problem(mount) if runtime == "pyxis" else _bind_problem(mount)
        if problem:
            raise resolved.refusal("job.mounts", f"{mount!r} is not valid: {problem}")
    if "," in (profile.runs_root or ""):
        raise resolved.refusal(key, f"{runtime} cannot mount {profile.runs_root}: a comma ends a mount; move runs_root")


def check_own_mounts(paths: Iterable[str], runtime: str) -> None:
    """Refuse a folder of the job's own that cannot be named as a mount: data, checkpoints, the working directory.

    Raises:
        UsageError: names the folder and what else can be done.
    """
    for path in paths:
        letter = next((letter for letter in ":," if letter in path), None)
        if letter is not None:
            raise UsageError(
                f"{runtime} cannot mount {path}: {letter!r} ends a name there; rename it, or give --mount for a folder "
                "above it"
            )


def _check_image(resolved: Resolved, image: str) -> None:
    if not is_file(image) and not _REFERENCE.fullmatch(image):
        raise resolved.refusal(
            "job.container", f"{image!r} is not valid: a file begins with / or ., an image is [REGISTRY#]IMAGE[:TAG]"
        )
    if not is_file(image) and image.endswith((".sqsh", ".sif")):
        raise resolved.refusal("job.container", f"{image} would be looked for in a registry; a file begins with / or .")


def on_host(path: str, mounts: Sequence[str]) -> str | None:
    """Where a path of the container is on the host, if one of the mounts shows it; None if none does."""
    inside = PurePosixPath(path)
    for mount in mounts:
        source, _, rest = mount.partition(":")
        target = rest.partition(":")[0] or source
        if source.startswith("/") and inside.is_relative_to(target):
            return str(PurePosixPath(source) / inside.relative_to(target))
    return None


def _pyxis_problem(mount: str) -> str:
    parts = mount.split(":")
    if "," in mount or len(parts) > 3:
        return "give SRC:DST or SRC:DST:FLAGS, one --mount for each, flags joined by + as in ro+rprivate"
    source = parts[0]
    if not (source in ("tmpfs", "umount") or source.startswith(("/", "./"))):
        return "SRC is an absolute path, a relative one that begins with ./, tmpfs or umount"
    if len(parts) > 1 and not parts[1].startswith("/"):
        return "DST is an absolute path in the container"
    if len(parts) == 3 and not _FLAGS.fullmatch(parts[2]):
        return "FLAGS are joined by +, as in ro+rprivate"
    return ""


def _bind_problem(mount: str) -> str:
    parts = mount.split(":")
    if "," in mount or len(parts) > 3:
        return "give SRC:DST or SRC:DST:ro, one --mount for each"
    if not all(part.startswith("/") for part in parts[:2]):
        return "SRC and DST are absolute paths"
    return ""
