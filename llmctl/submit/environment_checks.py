"""Checks of the submitting machine: GPUs, torch and the container runtime."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from llmctl.backends import capabilities_of
from llmctl.backends.base import JobRequest
from llmctl.context import Context, is_remote
from llmctl.errors import SchedulerError
from llmctl.paths import profile_files
from llmctl.site.profile import ClusterProfile
from llmctl.submit.origins import Problem, profile_error
from llmctl.submit.render import environment_script
from llmctl.submit.request import job_python
from llmctl.transport.protocol import CommandResult, Transport

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
    """Versions of Python and torch for a job. ``built_for``: CUDA or ROCm version; empty for CPUs."""

    python: str
    torch: str
    built_for: str

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"python {self.python}, torch {self.torch} for {f'GPUs ({self.built_for})' if self.built_for else 'CPUs'}"
        )


def check_torch(
    profile: ClusterProfile, context: Context, transport: Transport, python: str, request: JobRequest
) -> TorchFound | None:
    """Refuse a Python without torch, and a torch built for CPUs on GPU nodes.

    Returns:
        The versions; None if our own interpreter has a torch, which is not imported.

    Raises:
        ProfileError: no torch, no such Python, or a torch built for CPUs; names the remedy.
        SchedulerError: the Python does not answer.
    """
    software = profile.environment
    is_plain = not (software.modules or software.setup or software.kind)
    found: TorchFound | Problem | None
    if python == sys.executable and is_plain and not transport.is_remote and not request.gpus_per_node:
        from importlib.util import find_spec

        found = None if find_spec("torch") is not None else _no_torch(python)
    else:
        argv = ["bash", "-c", environment_script(profile, context.folders), "bash", python, "-c", _PROBE]
        found = judge_torch(python, transport.run(argv, timeout_s=_IMPORT_TIMEOUT_S), request)
    if isinstance(found, Problem):
        raise profile_error(context, profile, [found])
    return found


def judge_torch(python: str, answer: CommandResult, request: JobRequest) -> TorchFound | Problem:
    """Parse the output of the torch probe: versions, or the problem. Pure."""
    if answer.exit_status == 3:
        return _no_torch(python)
    words = answer.stdout.split()[-3:]
    if answer.exit_status != 0 or len(words) != 3:
        return Problem(
            "environment",
            f"{python} does not start: {_last_words(answer)}\nllmctl clusters validate checks it",
            of="profile",
        )
    found = TorchFound(words[0], words[1], words[2].strip("-"))
    if request.gpus_per_node and not found.built_for:
        kind = request.resource_type or f"the nodes of {request.profile.name}"
        return Problem(
            "environment",
            f"{python} has torch {found.torch}, built for CPUs, and {kind} has GPUs; install a torch for GPUs: "
            "https://pytorch.org/get-started\nto train on CPUs instead: --set training.device=cpu",
            of="profile",
        )
    return found


def check_job_python(profile: ClusterProfile, context: Context) -> None:
    """Refuse an environment whose Python does not start or has no torch. Images are not checked.

    Raises:
        ProfileError: names the remedy.
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
    """Refuse a container without its runtime: a Slurm without pyxis, or modules that cannot be loaded.

    Returns:
        A warning if only the compute nodes may have the runtime; else empty.

    Raises:
        ProfileError: names the alternatives.
        SchedulerError: the machine does not answer.
    """
    if request.container is None:
        return ""
    runtime = request.container.runtime
    if runtime == "pyxis":
        argv = ["srun", "--help"]
    else:
        look = f"command -v {runtime} >/dev/null || echo missing"
        argv = ["bash", "-c", environment_script(profile, context.folders), "bash", "bash", "-c", look]
    answer = transport.run(argv, timeout_s=_LOOK_TIMEOUT_S)
    problem = judge_runtime(runtime, answer, transport.host)
    if problem is None:
        return ""
    if problem.key == "container.runtime" and runtime != "pyxis" and capabilities_of(profile.scheduler).has_queue:
        file = profile_files(context.folders, profile.name)[-1]
        missing = f"{transport.host} has no {runtime}; unless the compute nodes have it without a module"
        return f"{missing}, add its module to environment.modules in {file}"
    raise profile_error(context, profile, [problem])


def judge_runtime(runtime: str, answer: CommandResult, host: str) -> Problem | None:
    """Parse a host's answer to the probe of the container runtime; None without a problem. Pure.

    Args:
        runtime: of the containers.
        answer: of ``srun --help`` for pyxis; else of ``command -v`` in the jobs' environment.
        host: name for the message.
    """
    key = "container.runtime"
    if runtime == "pyxis":
        if "--container-image" in answer.stdout + answer.stderr:
            return None
        advice = "leave the image out, or set container.runtime to enroot or apptainer if the site has either"
        return Problem(key, f"is pyxis; srun on {host} has no --container-image\n{advice}", of="profile")
    if answer.exit_status != 0:
        return Problem("environment", f"cannot be set up on {host}: {_last_words(answer)}", of="profile")
    if answer.stdout.split()[-1:] != ["missing"]:
        return None
    advice = "add its module to environment.modules, or install it"
    return Problem(key, f"{host} has no {runtime}, which runs the image; {advice}", of="profile")


def visible_gpus(context: Context) -> tuple[str, ...]:
    """Ids of the GPUs that a job on this machine may use, in the syntax of CUDA_VISIBLE_DEVICES."""
    visible = context.environment.get("CUDA_VISIBLE_DEVICES")
    found = _installed_gpus(context)
    if visible is None:
        return found
    # CUDA stops at the first entry that names no device, so that -1 and NoDevFiles hide all devices:
    # https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    listed = []
    for entry in (part.strip() for part in visible.split(",")):
        if not found or not (entry in found or entry.startswith(("GPU-", "MIG-"))):
            break
        listed.append(entry)
    return tuple(listed)


def _no_torch(python: str) -> Problem:
    return Problem(
        "environment", f"{python} has no torch, which the trainer needs\ninstall it: {python} -m {_PIP}", of="profile"
    )


def _last_words(answer: CommandResult) -> str:
    return " ".join(answer.stderr.split())[-300:] or f"exit status {answer.exit_status}"


def _installed_gpus(context: Context) -> tuple[str, ...]:
    count = sum(1 for _ in _DRIVER.iterdir()) if _DRIVER.is_dir() else 0
    # Some containers hide the driver's folder while nvidia-smi works.
    if not count and shutil.which("nvidia-smi", path=context.environment.get("PATH")):
        try:
            answer = context.transport.run(["nvidia-smi", "-L"], timeout_s=_LOOK_TIMEOUT_S)
        except SchedulerError:
            return ()
        lines = answer.stdout.splitlines() if answer.exit_status == 0 else []
        count = sum(line.startswith("GPU ") for line in lines)
    return tuple(str(number) for number in range(count))
