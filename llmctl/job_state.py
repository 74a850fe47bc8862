"""The nine states that a run can be in, the same words for every scheduler."""

from enum import Enum


class JobState(str, Enum):
    """State of a run. ``unknown`` always comes with the raw word or the reason for the doubt."""

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
        """Whether the run has ended for certain. ``unknown`` has not: nothing is ever concluded from doubt."""
        return self not in (JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN)

    def __str__(self) -> str:
        return self.value
