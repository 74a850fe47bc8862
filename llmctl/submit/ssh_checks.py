"""What is refused before a run is started on machines behind ssh. Pure."""

from typing import TYPE_CHECKING

from llmctl.errors import ProfileError
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile
from llmctl.submit.resolve import Resolved

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


def check_hosts(resolved: Resolved, job: JobSpec, profile: ClusterProfile) -> None:
    """Refuse more nodes than the profile has hosts.

    Raises:
        UsageError, ConfigFileError: names the number of hosts.
        ProfileError: it has none.
    """
    if not profile.hosts:
        raise ProfileError(
            f"cluster {profile.name}: hosts: there are none; name the machines, the head first: hosts: [gpu1, gpu2]"
        )
    doubled = next((host for host in profile.hosts if profile.hosts.count(host) > 1), None)
    if doubled is not None:
        raise ProfileError(f"cluster {profile.name}: hosts: {doubled} stands there twice; each machine is one node")
    if job.nodes > len(profile.hosts):
        raise resolved.refusal(
            "job.nodes", f"{job.nodes} is above {len(profile.hosts)}, the hosts of {profile.name}; lower it"
        )


def check_unshared(resolved: Resolved, job: JobSpec, config: "TrainConfig | None", profile: ClusterProfile) -> None:
    """Refuse to train on several hosts without a shared place for checkpoints: each rank saves its own part.

    Raises:
        UsageError, ConfigFileError: says what to set.
    """
    if config is None or profile.shared or job.nodes == 1 or config.checkpoint.save is not None:
        return
    raise resolved.refusal(
        "checkpoint.save",
        f"is unset: the hosts of {profile.name} share no runs_root (shared: false), and the parts of a checkpoint "
        "belong together; name a folder that all of them see, or train on one node",
        also=("checkpoint.save", "job.nodes"),
    )
