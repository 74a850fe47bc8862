"""The container of a job: image, and the prefix that runs commands inside. Pure.

Options by the tools' own pages: pyxis (https://github.com/NVIDIA/pyxis/wiki/Usage), enroot start
(https://github.com/NVIDIA/enroot/blob/master/doc/cmd/start.md), apptainer exec
(https://apptainer.org/docs/user/main/cli/apptainer_exec.html).
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile, ContainerProfile


@dataclass(frozen=True)
class ContainerPlan:
    """The container of one job.

    Attributes:
        runtime: pyxis, enroot, apptainer or singularity.
        image: as the user names the image: a path, or an image of a registry.
        imported: file to import the image to, once, and to run from; None without an import.
        mounts: ``SRC:DST[:FLAGS]``.
        site: the profile's other container settings.
    """

    runtime: str
    image: str
    imported: str | None
    mounts: tuple[str, ...]
    site: ContainerProfile

    @property
    def source(self) -> str:
        """The image URI for apptainer pull and enroot import."""
        if self.runtime in ("pyxis", "enroot"):
            image = enroot_name(self.image)
            return image if "://" in image else f"docker://{image}"
        return f"docker://{self.image.removeprefix('docker://').replace('#', '/')}"

    @property
    def srun_options(self) -> tuple[str, ...]:
        """Options of srun for a container started by pyxis; else empty."""
        if self.runtime != "pyxis":
            return ()
        site = self.site
        words = [
            f"--container-image={self.imported or enroot_name(self.image)}",
            f"--container-mounts={','.join(self.mounts)}",
        ]
        for flag, value in (("workdir", site.workdir), ("name", site.name), ("save", site.save)):
            if value is not None:
                words.append(f"--container-{flag}={value}")
        switches = (("mount-home", site.mount_home), ("remap-root", site.remap_root), ("entrypoint", site.entrypoint))
        words += [f"--{'' if value else 'no-'}container-{name}" for name, value in switches if value is not None]
        if site.writable is not None:
            words.append("--container-writable" if site.writable else "--container-readonly")
        if site.env:
            words.append(f"--container-env={','.join(site.env)}")
        return (*words, *site.options)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before image and command that run the command inside the container; empty with pyxis."""
        if self.runtime == "pyxis":
            return ()
        site = self.site
        if self.runtime == "enroot":
            words = ["enroot", "start", *(["--rw"] if site.writable else []), *(["--root"] if site.remap_root else [])]
            words += [word for mount in self.mounts for word in ("--mount", mount)]
            return (*words, *(word for name in site.env for word in ("--env", name)), *site.options)
        words = [self.runtime, "exec", *(["--writable-tmpfs"] if site.writable else [])]
        words += ["--no-home"] if site.mount_home is False else []
        words += [word for mount in self.mounts for word in ("--bind", mount)]
        words += ["--pwd", site.workdir] if site.workdir is not None else []
        return (*words, *site.options)

    @property
    def argument(self) -> str:
        """The image in the form that follows ``prefix``."""
        if self.imported is not None or self.image.startswith("/"):
            return self.imported or self.image
        return self.source


def is_file(image: str) -> bool:
    """True if an image is a path, not a registry's name, by pyxis' rule."""
    return image.startswith(("/", "."))


def enroot_name(image: str) -> str:
    """An image in the syntax of enroot and pyxis, which write # between registry and image where others write /.

    As for docker, the first part of a name is a registry if it has a dot or a colon, or is localhost. Paths, names
    with # and images of a local daemon (dockerd://, podman://) stay. Docker Hub is enroot's default, and docker.io not
    its server. Source: docker::import in https://github.com/NVIDIA/enroot/blob/master/src/docker.sh.
    """
    scheme, mark, name = image.rpartition("://")
    first, slash, rest = name.partition("/")
    user, at, registry = first.rpartition("@")
    if is_file(image) or scheme not in ("", "docker") or "#" in name or not slash:
        return image
    if registry in ("docker.io", "index.docker.io"):
        return f"{scheme}{mark}{user}{at}{rest}"
    if registry != "localhost" and not set(registry) & set(".:"):
        return image
    return f"{scheme}{mark}{first}#{rest}"


def on_host(path: str, mounts: Sequence[str]) -> str | None:
    """Host path of a path inside the container; None if no mount covers the path."""
    inside = PurePosixPath(path)
    for mount in mounts:
        source, _, rest = mount.partition(":")
        target = rest.partition(":")[0] or source
        if source.startswith("/") and inside.is_relative_to(target):
            return str(PurePosixPath(source) / inside.relative_to(target))
    return None


def plan_container(
    job: JobSpec, profile: ClusterProfile, *, cwd: str, own_mounts: tuple[str, ...] = ()
) -> ContainerPlan | None:
    """Plan the container of a job; None for a job without one.

    Args:
        job: gives image and mounts.
        profile: gives the runtime; its environment may name an image for all jobs.
        cwd: base of a relative image path.
        own_mounts: folders that every job needs.
    """
    software, site = profile.environment, profile.container
    image = job.container or (software.path if software.kind == "container" else None)
    if image is None or site.runtime is None:
        return None
    if image.startswith("."):
        image = os.path.normpath(f"{cwd}/{image}")
    mounts = dict.fromkeys((*(f"{path}:{path}" for path in own_mounts), *site.mounts, *job.mounts))
    return ContainerPlan(site.runtime, image, _imported(image, profile), tuple(mounts), site)


def _imported(image: str, profile: ClusterProfile) -> str | None:
    """File that keeps a registry's image for all jobs; None without an import."""
    runtime, folder = profile.container.runtime, profile.container.image_folder
    if is_file(image) or (folder is None and runtime == "pyxis"):
        return None
    suffix = "sqsh" if runtime in ("pyxis", "enroot") else "sif"
    name = re.sub(r"[^A-Za-z0-9._-]+", "+", image.removeprefix("docker://"))
    return f"{folder or f'{profile.runs_root}/.images'}/{name}.{suffix}"
