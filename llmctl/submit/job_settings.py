"""job.json: the values of one submission that the supervisor needs. Pure; see llmctl/supervisor/settings.py."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.backends.base import Capabilities, JobRequest
from llmctl.site.profile import ClusterProfile
from llmctl.supervisor.settings import JobSettings

if TYPE_CHECKING:
    from llmctl.submit.render import RunLayout

OWN_VARIABLES = frozenset(
    {
        *(
            "LLMCTL_RUN_ID",
            "LLMCTL_RUN_DIR",
            "LLMCTL_ATTEMPT",
            "LLMCTL_ATTEMPT_DIR",
            "LLMCTL_HOSTFILE",
            "LLMCTL_PYTHON",
        ),
        *("LLMCTL_NODE", "LLMCTL_MASTER_PORT", "LLMCTL_ENVIRONMENT", "LLMCTL_GPUS"),
        *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES"),
    }
)
"""Variables of the contract between job.sh and the trainer; users cannot set them."""


def job_settings(
    profile: ClusterProfile,
    place: "RunLayout",
    request: JobRequest,
    capabilities: Capabilities,
    stop_after_s: int,
    command: Sequence[str],
) -> str:
    """Content of job.json.

    Args:
        profile: of the cluster.
        place: layout of the submission.
        request: to the scheduler.
        capabilities: of the scheduler.
        stop_after_s: seconds until the run is asked to stop; 0 disables the request.
        command: COMMAND; empty for the trainer.
    """
    rule = profile.rendezvous.port_rule
    is_local, is_ssh = capabilities.starts_in_place, capabilities.starts_on_hosts
    settings = JobSettings(
        run_id=place.run_id,
        run_dir=str(place.run_dir),
        submission=place.submission,
        nodes=request.nodes,
        ranks_per_node=place.ranks_per_node,
        is_training=not command,
        one_process_per_rank=request.launcher in ("srun", "mpirun") and not command,
        ports=profile.rendezvous.ports,
        port_rule=(rule.base, rule.modulo) if rule is not None else None,
        stop_grace_s=profile.stop_grace_s,
        stop_after_s=stop_after_s,
        secrets_file=_text(place.secrets_file),
        secrets_are_read_once=is_local,
        hosts=profile.hosts[: request.nodes] if is_ssh and request.launcher != "mpirun" else (),
        shared=profile.shared,
        in_image=request.container is not None,
        forgets_launchers=is_local,
    )
    return json.dumps(settings._asdict(), indent=1) + "\n"


def _text(path: Path | None) -> str | None:
    return str(path) if path is not None else None
