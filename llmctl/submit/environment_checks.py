"""Facts of the machine that submits a job: GPUs, torch, the container runtime."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from llmctl.backends import capabilities_of
from llmctl.backends.base import JobRequest
from llmctl.context import Context, is_remote
from llmctl.errors import ProfileError, SchedulerError
from llmctl.paths import profile_files
from llmctl.site.profile import ClusterProfile
from llmctl.submit.render import environment_script, job_python
from llmctl.transport.protocol import Transport

_LOOK_TIMEOUT_S = 60.0
_IMPORT_TIMEOUT_S = 300.0
"""The first import of torch from a busy parallel file system takes minutes."""
_DRIVER = Path("/proc/driver/nvidia/gpus")
_PIP = "pip install 'llmctl[train]'"
_PROBE = (
    "import sys\n"
    "try:\n    import torch\n"
    "except ModuleNotFoundError as error:\n    sys.exit(3 if error.name == 'torch' else str(error))\n"
    "gpu = torch.version.cuda or getattr(torch.version, 'hip', None) or '-'\n"
    "print(sys.version.split()[0], torch.__version__, gpu)\n"
)


@dataclass(frozen=True)
class TorchFound:
    """The versions that a job will run with. ``built_for``: CUDA or ROCm; empty for CPUs only."""

    python: str
    torch: str
    built_for: str

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"python {self.python}, torch {self.torch} for {f'GPUs ({self.built_for})' if self.built_for else 'CPUs'}"
        )


def check_own_torch(python: str) -> None:
    """Refuse to train with our own interpreter if it has no torch. Asks without importing it.

    Raises:
        ProfileError: gives the command that installs it.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise _no_torch(python)


def check_torch(
    profile: ClusterProfile, context: Context, transport: Transport, python: str, request: JobRequest
) -> TorchFound | None:
    """Refuse to train with a Python without torch, or with a torch for CPUs on GPUs. None: nothing was imported.

    Raises:
        ProfileError: there is none, or no such Python; says what to do.
        SchedulerError: the Python does not answer.
    """
    software = profile.environment
    is_plain = not (software.modules or software.setup or software.kind)
    if python == sys.executable and is_plain and not transport.is_remote and not request.gpus_per_node:
        check_own_torch(python)
        return None
    script = environment_script(profile, context.folders)
    argv = ["bash", "-c", script, "bash", python, "-c", _PROBE]
    answer = transport.run(argv, timeout_s=_IMPORT_TIMEOUT_S)
    if answer.exit_status == 3:
        raise _no_torch(python)
    words = answer.stdout.split()[-3:]
    if answer.exit_status != 0 or len(words) != 3:
        file = profile_files(context.folders, profile.name)[-1]
        said = " ".join(answer.stderr.split())[-300:] or f"exit status {answer.exit_status}"
        raise ProfileError(f"{file}: environment: {python} does not start: {said}\nllmctl clusters validate checks it")
    found = TorchFound(words[0], words[1], words[2].strip("-"))
    if request.gpus_per_node and not found.built_for:
        kind = request.resource_type or f"the nodes of {profile.name}"
        raise ProfileError(
            f"{python} has torch {found.torch}, which is built for CPUs, and {kind} has GPUs: install one for GPUs "
            "(https://pytorch.org/get-started)\nto train on CPUs all the same: --set training.device=cpu"
        )
    return found


def check_job_python(profile: ClusterProfile, context: Context) -> None:
    """Refuse an environment whose Python does not start, or has no torch. One in an image is not looked into.

    Raises:
        ProfileError: says what to do.
        SchedulerError: the machine or the Python does not answer.
    """
    own = "" if is_remote(profile) else sys.executable
    python = job_python(profile, context.folders, own)
    if profile.environment.kind != "container" and python:
        request = JobRequest(profile, job_name="", run_dir="")
        check_torch(profile, context, context.connect(profile), python, request)


def check_container_runtime(
    profile: ClusterProfile, context: Context, transport: Transport, request: JobRequest
) -> str:
    """Refuse a container where nothing starts it: a Slurm without pyxis, or modules that cannot be loaded.

    Returns:
        A remark where a login node cannot tell what the nodes have; else nothing.

    Raises:
        ProfileError: says what else there is.
        SchedulerError: the machine does not answer.
    """
    if request.container is None:
        return ""
    runtime = request.container.runtime
    if runtime == "pyxis":
        _check_pyxis(profile, transport)
        return ""
    script = environment_script(profile, context.folders)
    look = f"command -v {runtime} >/dev/null || echo missing"
    answer = transport.run(["bash", "-c", script, "bash", "bash", "-c", look], timeout_s=_LOOK_TIMEOUT_S)
    file = profile_files(context.folders, profile.name)[-1]
    if answer.exit_status != 0:
        said = " ".join(answer.stderr.split())[-300:] or f"exit status {answer.exit_status}"
        raise ProfileError(f"{file}: environment: it cannot be set up on {transport.host}: {said}")
    if answer.stdout.split()[-1:] != ["missing"]:
        return ""
    missing = f"{transport.host} has no {runtime}"
    mend = f"add its module to environment.modules in {file}"
    if not capabilities_of(profile.scheduler).has_queue:
        raise ProfileError(f"{missing}, which runs the image; {mend}, or install it")
    return f"{missing}; unless the compute nodes have it without a module, {mend}"


def visible_gpus(context: Context) -> tuple[str, ...]:
    """Ids of the GPUs that a job started from here may use, as CUDA_VISIBLE_DEVICES takes them."""
    visible = context.environment.get("CUDA_VISIBLE_DEVICES")
    found = _installed_gpus(context)
    if visible is None:
        return found
    # CUDA stops at the first entry that names no device, which is how -1 and NoDevFiles hide all of them:
    # https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    listed = []
    for entry in (part.strip() for part in visible.split(",")):
        if not found or not (entry in found or entry.startswith(("GPU-", "MIG-"))):
            break
        listed.append(entry)
    return tuple(listed)


def _check_pyxis(profile: ClusterProfile, transport: Transport) -> None:
    answer = transport.run(["srun", "--help"], timeout_s=_LOOK_TIMEOUT_S)
    if "--container-image" not in answer.stdout + answer.stderr:
        raise ProfileError(
            f"cluster {profile.name}: container.runtime is pyxis; srun on {transport.host} has no --container-image\n"
            "leave the image out, or set container.runtime to enroot or apptainer if the site has either"
        )


def _no_torch(python: str) -> ProfileError:
    return ProfileError(f"{python} has no torch, which the trainer needs; install it:\n{python} -m {_PIP}")


def _installed_gpus(context: Context) -> tuple[str, ...]:
    count = sum(1 for _ in _DRIVER.iterdir()) if _DRIVER.is_dir() else 0
    # In some containers the driver's folder is hidden while its program works.
    if not count and shutil.which("nvidia-smi", path=context.environment.get("PATH")):
        try:
            answer = context.transport.run(["nvidia-smi", "-L"], timeout_s=_LOOK_TIMEOUT_S)
        except SchedulerError:
            return ()
        lines = answer.stdout.splitlines() if answer.exit_status == 0 else []
        count = sum(line.startswith("GPU ") for line in lines)
    return tuple(str(number) for number in range(count))
