"""The kernels of a cluster's jobs: built or examined by the jobs' own Python and in their environment."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmctl.context import Invocation
from llmctl.doctor.python import ARCHITECTURES
from llmctl.operate.trainer_command import run_trainer_command

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile


def run_kernels_command(invocation: Invocation, profile: "ClusterProfile", words: Sequence[str]) -> int:
    """Run ``python -m trainer kernels WORDS`` where a cluster's jobs are submitted from; its exit status.

    What is built here is found by the jobs: the cache is theirs.

    Raises:
        ProfileError: the jobs' Python cannot be started here, or runs_root cannot be written.
        SchedulerError: the machine cannot be reached.
    """
    return run_trainer_command(invocation, profile, ["kernels", *words, *_architectures(profile, words[0])])


def _architectures(profile: "ClusterProfile", action: str) -> list[str]:
    """The flag that has kernels built for the GPUs of the compute nodes, where a login node may have none."""
    kinds = {ARCHITECTURES.get(kind.gpu or "", "") for kind in profile.resource_types.values()}
    nvidia = sorted(kind for kind in kinds if kind and not kind.startswith("gfx"))
    return ["--architecture", *nvidia] if nvidia and action == "build" else []
