"""Checks of a job's image and mounts, by the container runtime's rules. Pure.

Mounts and images by pyxis 0.24 (https://github.com/NVIDIA/pyxis, args.c) and apptainer exec
(https://apptainer.org/docs/user/main/cli/apptainer_exec.html).
"""

import re
from collections.abc import Iterator

from llmctl.site.container import is_file
from llmctl.submit.job import Job, Problem

_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+#-]*")
"""[USER@][REGISTRY/]IMAGE[:TAG], also with the # of pyxis and enroot between registry and image."""
_FLAGS = re.compile(r"[A-Za-z0-9_=+-]+")


def container_problems(job: Job) -> Iterator[Problem]:
    """Problems of an image or a mount that the site cannot start."""
    image, mounts, runtime = job.image, job.spec.mounts, job.profile.container.runtime
    if image is None:
        if mounts:
            yield Problem("job.mounts", f"{mounts[0]} has no effect without an image; give --container IMAGE too")
        return
    if runtime is None:
        yield Problem(
            "job.container",
            f"{image}: {job.profile.name} has no container runtime; leave the image out, or set "
            f"container.runtime (pyxis, enroot, apptainer, singularity) in {job.overlay}",
        )
        return
    if runtime == "pyxis":
        yield from _pyxis_problems(job)
    yield from _image_problems(image, is_remote=job.is_remote)
    for mount in mounts:
        wrong = _pyxis_problem(mount) if runtime == "pyxis" else _bind_problem(mount)
        if wrong:
            yield Problem("job.mounts", f"{mount!r} is not valid: {wrong}")
    yield from _own_mount_problems(job)


def bare_warnings(job: Job) -> Iterator[str]:
    """A job without an image where jobs may be meant to have one: it runs with the software of the nodes."""
    profile, software = job.profile, job.profile.environment
    if job.image is not None or software.path is not None or software.python is not None or job.queue is None:
        return
    if job.config is not None:
        yield (
            f"no image is given: the run uses no container, but {job.python} on the nodes themselves, which is the "
            f"Python of llmctl on this machine; give --container IMAGE, or name a Python of the nodes: llmctl clusters "
            f"setup {profile.name} --venv DIR"
        )
    elif not (software.modules or software.setup):
        yield "no image is given: COMMAND runs on the nodes themselves, in no container; give --container IMAGE for one"


def _image_problems(image: str, *, is_remote: bool) -> Iterator[Problem]:
    if not is_file(image) and not _REFERENCE.fullmatch(image):
        text = f"{image!r} is not valid: a file begins with / or ., an image is [REGISTRY/]IMAGE[:TAG]"
        yield Problem("job.container", text)
    elif not is_file(image) and image.endswith((".sqsh", ".sif")):
        text = f"{image} would be looked for in a registry; a file begins with / or ."
        yield Problem("job.container", text)
    elif image.startswith(".") and is_remote:
        text = f"{image} is relative, and the job runs on other machines; give a path there, beginning with / or ~/"
        yield Problem("job.container", text)


def _own_mount_problems(job: Job) -> Iterator[Problem]:
    """Folders of the job whose names cannot appear in a mount."""
    runtime = job.profile.container.runtime
    root = job.profile.runs_root or ""
    if "," in root:
        key = "job.container" if job.spec.container else "job.mounts"
        yield Problem(key, f"{runtime} cannot mount {root}: a comma ends a mount; move runs_root")
        return
    for path in job.own_mounts:  # data, checkpoints, the working directory
        letter = next((letter for letter in ":," if letter in path), None)
        if letter is not None:
            text = f"{letter!r} ends a name there; rename it, or give --mount for a folder above it"
            yield Problem("", f"{runtime} cannot mount {path}: {text}", of="flag")


def _pyxis_problems(job: Job) -> Iterator[Problem]:
    save, nodes = job.profile.container.save, job.spec.nodes
    if job.request.launcher == "mpirun":
        yield Problem(
            "job.launcher",
            "mpirun starts its ranks outside the container of pyxis; use torchrun, or srun, which takes --mpi=pmix in "
            "launch.srun_options of the profile",
        )
    if save is not None and nodes > 1:
        yield Problem(
            "job.nodes",
            f"{job.profile.name} keeps the container's end state in {save} (container.save), and {nodes} nodes would "
            f"overwrite each other's state; use one node, or unset container.save in {job.overlay}",
        )


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
