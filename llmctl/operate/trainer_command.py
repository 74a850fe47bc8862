"""The trainer's commands, on a cluster's submitting machine, with the jobs' Python and environment."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.context import Context, is_remote, resolve_profile_paths
from llmctl.doctor.torch_wheels import ARCHITECTURES
from llmctl.errors import ProfileError
from llmctl.submit.checks.torch_check import check_job_python
from llmctl.submit.decide import job_python
from llmctl.submit.render import interactive_script
from llmctl.submit.snapshot import store_trainer

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile

_FINDS_MODULES = 'PYTHONPATH="$1${PYTHONPATH:+:$PYTHONPATH}" exec "${@:2}"'
_DATA_PACKAGES = ("numpy",)
"""Packages of the trainer's data commands, which work without torch."""


def finding_modules(folder: Path) -> tuple[str, ...]:
    """Words before a command that finds Python modules in ``folder`` first."""
    return "bash", "-c", _FINDS_MODULES, "bash", str(folder)


def run_trainer_command(
    context: Context, profile: "ClusterProfile", words: Sequence[str], modules: Path | None = None
) -> int:
    """Run ``python -m trainer WORDS`` on the machine that submits ``profile``'s jobs; returns the exit status.

    Uses the same code snapshot and cache as jobs. On this machine, paths are relative to the working directory,
    elsewhere to the home directory. Modules of the user's own are found in ``modules`` first.

    Raises:
        ProfileError: the jobs' Python cannot be started here, or runs_root cannot be written.
        SchedulerError: the machine cannot be reached.
    """
    profile = resolve_profile_paths(profile, context)
    software, root = profile.environment, Path(str(profile.runs_root))
    if software.kind == "container":
        raise ProfileError(
            f"the jobs of {profile.name} run in the image {software.path}, which is not started on this node\n"
            f"llmctl interactive --cluster {profile.name} -- python3 -m trainer {shlex.join(words)}"
        )
    check_job_python(profile, context, packages=_DATA_PACKAGES if words[0] == "data" else None)
    transport = context.connect(profile)
    try:
        code = store_trainer(root, transport, context.folders)
    except OSError as error:
        raise ProfileError(f"{profile.name}: runs_root: {root} cannot be written: {error}") from None
    remote = is_remote(profile)
    python = job_python(profile, context.folders, "python3" if remote else sys.executable)
    # The trainer ends if this process is killed by SIGKILL. A lost connection ends it elsewhere.
    variables = {} if remote else {"LLMCTL_PARENT": str(os.getpid())}
    script = interactive_script(
        profile,
        context.folders,
        python,
        on_cpu=True,
        env=tuple(variables.items()),
        own_dir=code.parents[1],
    )
    # Not -m: the working directory or PYTHONPATH may have another package trainer.
    finding = () if modules is None else finding_modules(modules)
    argv = ["bash", "-c", script, "bash", *finding, python, str(code / "trainer"), *words]
    return transport.run_interactive(argv, cwd=None if remote else os.fspath(context.cwd))


def run_kernels_command(context: Context, profile: "ClusterProfile", words: Sequence[str]) -> int:
    """Run ``python -m trainer kernels WORDS`` on a cluster's submitting machine; returns the exit status.

    Builds go to the jobs' cache, so that jobs find them.

    Raises:
        ProfileError: the jobs' Python cannot be started here, or runs_root cannot be written.
        SchedulerError: the machine cannot be reached.
    """
    return run_trainer_command(context, profile, ["kernels", *words, *_architectures(profile, words[0])])


def _architectures(profile: "ClusterProfile", action: str) -> list[str]:
    """The flag that builds kernels for the compute nodes' GPUs. Login nodes may have no GPU."""
    kinds = {ARCHITECTURES.get(kind.gpu or "", "") for kind in profile.resource_types.values()}
    nvidia = sorted(kind for kind in kinds if kind and not kind.startswith("gfx"))
    return ["--architecture", *nvidia] if nvidia and action == "build" else []
