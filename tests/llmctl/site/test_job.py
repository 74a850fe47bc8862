"""Time limits, as users of every scheduler write them, and restarts."""

import pytest

from llmctl.site.job import JobError, JobSpec, parse_time

HOUR = 3600


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1:30:00", 1.5 * HOUR),
        ("90:00", 1.5 * HOUR),
        ("90m", 1.5 * HOUR),
        ("1h30m", 1.5 * HOUR),
        ("5H", 5 * HOUR),
        ("2d", 48 * HOUR),
        ("1d 12h", 36 * HOUR),
        ("45s", 45),
        ("1-02:30:00", 26.5 * HOUR),
        ("1-02:30", 26.5 * HOUR),
        ("720:00:00", 720 * HOUR),
    ],
)
def test_time_limits(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    "text", ["90", "0m", "", "1:99:00", "1:00:60", "5x", "m", "1m1h", "-5m", "1-10", "1.5h", "0:00:00"]
)
def test_a_time_without_a_unit_or_of_another_form_is_refused(text):
    with pytest.raises(JobError, match=r"give H:M:S, as in 1:30:00, or units, as in 90m, 5h, 1h30m or 2d"):
        parse_time(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_restarts": -1}, "job.max_restarts: -1 is not valid: give a number from 0 on"),
        (
            {"max_restarts": 1, "restart_on": ["rain"]},
            "job.restart_on: 'rain' is none of killed, lost_peer, hang, node",
        ),
        ({"preflight": "deep"}, "job.preflight: 'deep' is not valid: give off or quick"),
        ({"preflight": "quick", "command": ["true"]}, "job.preflight: a COMMAND has none, as the trainer itself"),
        ({"hang_timeout_s": 29}, "job.hang_timeout_s: 29 is not valid: give 30 or more, or 0 to end no run"),
        ({"restart_on": ["killed"]}, "job.restart_on: there are no restarts; give --max-restarts N"),
    ],
)
def test_wrong_restarts_are_refused(values, message):
    with pytest.raises(JobError, match=message):
        JobSpec.from_plain({"name": "r", **values})
