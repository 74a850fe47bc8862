"""One cluster as this call of llmctl reaches it: its profile, the hands on its machine, and its scheduler, if any."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llmctl.backends import load_queue_backend
from llmctl.backends.base import QueueBackend
from llmctl.context import Invocation
from llmctl.job_state import JobState
from llmctl.runs.job_status import SchedulerWatch
from llmctl.runs.record import RunRecord
from llmctl.secrets import secrets_file
from llmctl.site.profile import ClusterProfile
from llmctl.transport.protocol import Hands


@dataclass(frozen=True)
class ClusterReach:
    """A cluster that runs are looked at on, or ended.

    Attributes:
        profile: of the cluster.
        hands: the machine of its files and commands; connected when first used.
        backend: of its scheduler; None where jobs are processes.
    """

    profile: ClusterProfile
    hands: Hands
    backend: QueueBackend | None

    @classmethod
    def of(cls, invocation: Invocation, cluster: str, origin: str) -> "ClusterReach":
        """Reach for a cluster.

        Args:
            invocation: this call of llmctl.
            cluster: its name.
            origin: where the name came from, for the message.

        Raises:
            ProfileError: it has no profile, or one that cannot be used.
            UsageError: the same, and ``origin`` is a flag.
        """
        profile = invocation.profile(cluster, origin)
        return cls(profile, invocation.connect(profile), load_queue_backend(profile.scheduler))

    def watch(
        self,
        *,
        interval_s: float = 0.0,
        remembered: Mapping[str, tuple[JobState, float]] | None = None,
        asks_again: bool = False,
    ) -> SchedulerWatch | None:
        """The scheduler, to be asked about jobs; None where jobs are processes. See SchedulerWatch."""
        if self.backend is None:
            return None
        return SchedulerWatch(
            self.backend, self.hands, interval_s=interval_s, remembered=remembered, asks_again=asks_again
        )

    def remove_secrets(self, invocation: Invocation, records: Iterable[RunRecord]) -> None:
        """Remove the secrets of runs that have ended: a job that never ran, or was killed, leaves them.

        Raises:
            SchedulerError: the machine cannot be reached.
        """
        paths = [
            secrets_file(invocation, self.profile, record.run_dir, submission.number)
            for record in records
            if record.job.get("secrets")
            for submission in record.submissions
        ]
        if paths:
            self.hands.remove(paths)
