"""The nine run states, in the same words for every scheduler."""

from enum import Enum


class JobState(str, Enum):
    """State of a run. ``unknown`` always comes with the scheduler's raw word or the reason for the doubt."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    UNKNOWN = "unknown"

    @property
    def is_finished(self) -> bool:
        """True if the run has certainly ended. ``unknown`` is not finished: llmctl concludes nothing from doubt."""
        return self not in (JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN)

    def __str__(self) -> str:
        return self.value
