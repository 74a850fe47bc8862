"""Check that the jobs' Python has a torch that fits the nodes, with a memory of the last good answer.

An import of torch takes seconds of the processor, on a busy parallel file system minutes.
"""

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmctl.backends.base import JobRequest
from llmctl.context import Context, is_remote
from llmctl.distribution import install_words
from llmctl.site.profile import ClusterProfile
from llmctl.submit.container_runtime import last_words
from llmctl.submit.decide import job_python
from llmctl.submit.job import Problem
from llmctl.submit.origins import profile_error
from llmctl.submit.render import environment_script
from llmctl.transport.file_writes import FileWrite, write_files
from llmctl.transport.protocol import CommandResult, Transport

_IMPORT_TIMEOUT_S = 300.0
"""The first import of torch from a busy parallel file system takes minutes."""
_PROBE = """\
import hashlib, importlib.util, os, sys
missing = [name for name in sys.argv[1].split() if importlib.util.find_spec(name) is None]
if missing:
    print(",".join(missing))
    sys.exit(4)
def facts(path):
    try:
        seen = os.stat(path)
    except OSError:
        return path
    return path, seen.st_ino, seen.st_size, seen.st_mtime_ns
spec = importlib.util.find_spec("torch")
folder = os.path.dirname(spec.origin or "") if spec else ""
paths = [sys.executable, folder + "/version.py", folder + "/lib"] + [path for path in sys.path if path]
names = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME")
now = repr((os.uname()[1], [os.environ.get(name) for name in names], [facts(path) for path in paths]))
now = hashlib.sha256(now.encode("utf-8", "surrogateescape")).hexdigest()
if now == sys.argv[-1]:
    print(*sys.argv[2:])
    sys.exit()
try:
    import torch
except ModuleNotFoundError as error:
    sys.exit(3 if error.name == "torch" else str(error))
gpu = torch.version.cuda or getattr(torch.version, "hip", None) or "-"
print(sys.version.split()[0], torch.__version__, gpu, now)
"""
"""Prints the versions of Python and torch, what torch is built for, and a digest of all that these depend on: machine,
interpreter, folders of modules, libraries. Arguments: names of packages that must be there, of which the missing
ones are printed; and the last answer, which is printed again if its digest is right.
"""
_PACKAGES_PROBE = """\
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if missing:
    print(missing[0])
    sys.exit(4)
"""
"""Prints the first missing package of its arguments."""
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Of torch's builds without CUDA (https://pytorch.org/get-started/locally/)."""
_GOOD_ANSWER = re.compile(r"[!-~]{1,80} [!-~]{1,80} [!-~]{1,80} [0-9a-f]{64}")


@dataclass(frozen=True)
class NeededPackage:
    """A package besides torch that a job needs.

    Attributes:
        module: name to import.
        package: name for pip.
        key: of the config that asks for it.
        is_optional: the run can train without the key.
    """

    module: str
    package: str
    key: str
    is_optional: bool = False


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
    profile: ClusterProfile,
    context: Context,
    transport: Transport,
    python: str,
    request: JobRequest,
    *,
    imports: bool = False,
    packages: Sequence[NeededPackage] = (),
) -> TorchFound | None:
    """Refuse a Python without torch or a named package, and a torch built for CPUs on GPU nodes.

    Args:
        profile: of the cluster.
        context: of this call.
        transport: the machine whose Python is asked.
        python: path of the interpreter.
        request: of the job.
        imports: torch must be imported, even if nothing has changed since the last good answer.
        packages: further packages that the job needs.

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

        missing = [name for name in ("torch", *(each.module for each in packages)) if find_spec(name) is None]
        found = _no_packages(python, missing, packages) if missing else None
    else:
        script = environment_script(profile, context.folders)
        memory = _memory(context, transport.host, script, python)
        known = "" if imports else _recall(memory)
        names = " ".join(each.module for each in packages)
        argv = ["bash", "-c", script, "bash", python, "-c", _PROBE, names, *known.split()]
        answer = transport.run(argv, timeout_s=_IMPORT_TIMEOUT_S, only_reads=True)
        found = judge_torch(python, answer, request, packages, elsewhere=transport.is_remote)
        _remember(memory, known, "" if isinstance(found, Problem) else " ".join(answer.stdout.split()[-4:]))
    if isinstance(found, Problem):
        raise profile_error(context, profile, [found])
    return found


def judge_torch(
    python: str,
    answer: CommandResult,
    request: JobRequest,
    packages: Sequence[NeededPackage] = (),
    *,
    elsewhere: bool = False,
) -> TorchFound | Problem:
    """Parse the output of the torch probe: versions, or the problem.

    Args:
        python: that was asked.
        answer: of the probe.
        request: of the job.
        packages: that were asked for.
        elsewhere: the Python is on another machine.
    """
    words = answer.stdout.split()[-4:]
    if answer.exit_status == 3 or (answer.exit_status == 4 and words):
        missing = words[-1].split(",") if answer.exit_status == 4 else ["torch"]
        return _no_packages(python, missing, packages, elsewhere=elsewhere)
    if answer.exit_status != 0 or len(words) != 4:
        return _does_not_start(python, answer)
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


def check_job_python(profile: ClusterProfile, context: Context, packages: Sequence[str] | None = None) -> None:
    """Refuse an environment whose Python does not start or has no torch. Images are not checked.

    Args:
        profile: of the cluster.
        context: of this call.
        packages: all packages that the work needs, if it does not need torch.

    Raises:
        ProfileError: names the remedy.
        SchedulerError: the machine or the Python does not answer.
    """
    own = "" if is_remote(profile) else sys.executable
    python = job_python(profile, context.folders, own)
    if profile.environment.kind == "container" or not python:
        return
    if packages is not None:
        _check_packages(profile, context, python, packages)
    else:
        request = JobRequest(profile, job_name="", run_dir="")
        check_torch(profile, context, context.connect(profile), python, request, imports=True)


def _check_packages(profile: ClusterProfile, context: Context, python: str, packages: Sequence[str]) -> None:
    transport = context.connect(profile)
    script = environment_script(profile, context.folders)
    argv = ["bash", "-c", script, "bash", python, "-c", _PACKAGES_PROBE, *packages]
    answer = transport.run(argv, timeout_s=_IMPORT_TIMEOUT_S, only_reads=True)
    missing = answer.stdout.split()[-1:]
    if answer.exit_status == 4 and missing:
        raise profile_error(context, profile, [_no_packages(python, missing)])
    if answer.exit_status:
        raise profile_error(context, profile, [_does_not_start(python, answer)])


def _does_not_start(python: str, answer: CommandResult) -> Problem:
    text = f"{python} does not start: {last_words(answer)}\nllmctl clusters validate checks it"
    return Problem("environment", text, of="profile")


def _no_packages(
    python: str, missing: Sequence[str], packages: Sequence[NeededPackage] = (), *, elsewhere: bool = False
) -> Problem:
    if "torch" in missing:
        words = install_words(elsewhere=elsewhere)
        text = (
            f"{python} has no torch, which the trainer needs\ninstall it: {python} -m pip install {words}\n"
            f"this takes about 5.6 GB; without a GPU, first: {python} -m pip install torch --index-url {_CPU_INDEX}"
        )
        return Problem("environment", text, of="profile")
    known = {each.module: each for each in packages}
    needed = [known.get(name, NeededPackage(name, name, "this run")) for name in missing]
    text = f"{python} has " + ", and ".join(f"no {each.module}, which {each.key} needs" for each in needed)
    pronoun = "it" if len(needed) == 1 else "them"
    text += f"\ninstall {pronoun}: {python} -m pip install {' '.join(each.package for each in needed)}"
    if all(each.is_optional for each in needed):
        text += f"\nor train without {pronoun}: {' '.join(f'--set {each.key}=null' for each in needed)}"
    return Problem("environment", text, of="profile")


def _memory(context: Context, host: str, script: str, python: str) -> Path:
    """File of the last good answer to this question."""
    import hashlib

    question = "\0".join((host, script, python)).encode("utf-8", "surrogateescape")
    return context.folders.state / "torch" / hashlib.sha256(question).hexdigest()


def _recall(memory: Path) -> str:
    """The last good answer; empty if there is none, or no readable one."""
    try:
        known = memory.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return known if _GOOD_ANSWER.fullmatch(known) else ""


def _remember(memory: Path, known: str, answer: str) -> None:
    """Keep a good answer. Any other, as the empty one of a Python that failed, removes the last one."""
    # Only time is lost if the file cannot be written.
    with suppress(OSError):
        if not _GOOD_ANSWER.fullmatch(answer):
            memory.unlink(missing_ok=True)
        elif answer != known:
            write_files([FileWrite(str(memory), answer.encode("ascii"))])
