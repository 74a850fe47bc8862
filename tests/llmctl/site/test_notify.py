"""Places and events of notices, and the mail words of schedulers."""

import pytest

from llmctl.site.job import JobError, JobSpec
from llmctl.site.notify import EVENTS, events_of_mail, place_problem

GOOD = [
    "https://ntfy.sh/my-runs",
    "http://10.0.0.1:8080/x?y=1",
    "mailto:me@lab.ac.jp",
    "mailto:me",
    "secret:WEBHOOK",
    "command:/home/me/tell 'two words'",
]
BAD = {
    "": "is not valid: give https://ADDRESS",
    "me@lab.org": "is not valid: give https://ADDRESS",
    "ftp://host/x": "is not valid: give https://ADDRESS",
    "https://": "is not a valid address",
    "https://a b/": "is not a valid address",
    "https://[x/": "is not a valid address",
    "mailto:": "has no valid address",
    "mailto:me@lab.org,you@lab.org": "has no valid address",
    "mailto:-oQ/tmp": "has no valid address",
    "mailto:a b": "has no valid address",
    "mailto:me@x\nBcc: you@y": "has a line break",
    "secret:": "is followed by something other than the name of a variable",
    "secret:https://x": "is followed by something other than the name of a variable",
    "secret:OTHER": "needs the variable; give --secret OTHER too",
    "command:": "names no program",
    "command:a 'b": "has a quote that never closes",
}
SECRET = "s3cr3t-part"
SECRETS = [
    f"https://hooks.slack.com/services/T0/B0/{SECRET}",
    f"https://discord.com/api/webhooks/1/{SECRET}",
    f"https://me:{SECRET}@host/x",
    f"command:curl https://hooks.slack.com/services/T0/B0/{SECRET}",
]


def test_every_kind_of_place_is_taken():
    job = JobSpec(name="n", notify=tuple(GOOD), notify_on=EVENTS, secrets=("WEBHOOK",))
    assert JobSpec.from_plain(job.as_plain()) == job


@pytest.mark.parametrize("place", BAD)
def test_a_wrong_place_is_named_with_what_is_valid(place):
    assert BAD[place] in place_problem(place, ["WEBHOOK"])
    with pytest.raises(JobError, match=r"^job\.notify: "):
        JobSpec(name="n", notify=(place,))


@pytest.mark.parametrize("place", SECRETS)
def test_an_address_that_is_a_secret_is_refused_without_repeating_it(place):
    said = place_problem(place, [])
    assert "is a secret of its own" in said and SECRET not in said


def test_events_need_a_place_and_a_known_name():
    with pytest.raises(JobError, match="there is no place to tell; give --notify WHERE"):
        JobSpec(name="n", notify_on=("end",))
    with pytest.raises(JobError, match="'done' is none of begin, end, fail, hang, restart"):
        JobSpec(name="n", notify=("mailto:me",), notify_on=("done",))


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("END,FAIL", ["end", "fail"]),
        ("end,fail", ["end", "fail"]),
        ("ALL", list(EVENTS)),
        ("TIME_LIMIT,END", ["end"]),
        ("REQUEUE", ["restart"]),
        ("NONE", []),
        ("abe", ["fail", "begin", "end"]),
        ("n", []),
        ("END,STAGE_OUT", None),
        ("bes", None),
        ("", None),
    ],
)
def test_mail_words_of_schedulers_are_events(text, events):
    assert events_of_mail(text) == events
