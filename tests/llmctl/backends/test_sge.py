"""Grid Engine: requests, and the parsed output of its programs. tests/recorded/sge holds outputs of 8.1.9."""

from pathlib import Path

import pytest

from llmctl.backends import load_queue_backend
from llmctl.backends.base import LOGIN, HostCommand
from llmctl.backends.sge.reports import parse_hosts, state_of
from llmctl.errors import ProfileError, SchedulerError
from llmctl.job_state import JobState
from llmctl.paths import UserFolders
from llmctl.site.profile import load_profile
from tests.llmctl.backends.job_requests import request_for

RECORDED = Path(__file__).parents[2] / "recorded" / "sge"
FOLDERS = UserFolders(home=Path("/home/ada"), config=Path("/none"), state=Path("/none"))
SGE = load_queue_backend("sge")
assert SGE is not None


def recorded(name):
    return (RECORDED / name).read_text(encoding="utf-8")


LIFE = SGE.parse_status(recorded("qstat_life.txt"))
ENDED = SGE.parse_accounting(recorded("qacct_ended.txt"))


def request(cluster="abci", **changes):
    profile = load_profile(FOLDERS, cluster)
    given = {
        "profile": profile,
        "job_name": "gpt-261121-101500-ab12",
        "run_dir": "/groups/gaa50001/ada/runs/gpt-261121-101500-ab12",
        "nodes": 8,
        "ranks_per_node": 4,
        "gpus_per_node": 4,
        "time_s": 90061,
        "resource_type": profile.defaults.resource_type,
        "group": "gaa50001",
    }
    return request_for(**{**given, **changes})


def test_the_head_of_a_script_for_abci():
    assert SGE.directives(request()) == [
        "-N gpt-261121-101500-ab12",
        "-l rt_F=8",
        "-l h_rt=25:01:01",
        "-S /bin/bash",
        "-cwd",
        "-j y",
        "-o job.log",
        "-r y",
    ]


def test_the_group_is_on_the_command_line_only():
    assert SGE.submit_commands(request()) == [HostCommand(LOGIN, ("qsub", "-g", "gaa50001", "job.sh"))]
    assert SGE.submit_commands(request(group=None)) == [HostCommand(LOGIN, ("qsub", "job.sh"))]
    assert not any("gaa50001" in line for line in SGE.directives(request()))


def test_reservation_queue_priority_and_dependency():
    lines = SGE.directives(request(reservation="12345", queue="prior", priority=-400, after=("77", "78")))
    assert {"-ar 12345", "-q prior", "-p -400", "-hold_jid 77,78"} <= set(lines)


def test_hosts_to_leave_out():
    assert "-l h=!(g0001|g0002)" in SGE.directives(request(exclude=("g0001", "g0002")))


def test_options_of_profile_and_resource_type_are_unchanged():
    profile = load_profile(FOLDERS, "abci")
    kind = profile.resource_types["rt_F"].model_copy(update={"options": ("-l USE_BEEOND=1",)})
    changed = profile.model_copy(update={"options": ("-l USE_SSH=1",), "resource_types": {"rt_F": kind}})
    lines = SGE.directives(request(profile=changed))
    assert lines.index("-l USE_SSH=1") < lines.index("-l USE_BEEOND=1")


def test_several_nodes_without_a_type_need_options_in_the_profile():
    with pytest.raises(ProfileError, match="-l TYPE=N"):
        SGE.directives(request(resource_type=None))
    profile = load_profile(FOLDERS, "abci").model_copy(update={"options": ("-pe mpi 8",)})
    assert "-pe mpi 8" in SGE.directives(request(resource_type=None, profile=profile))


def test_tsubame_always_sets_a_time_limit():
    profile = load_profile(FOLDERS, "tsubame4")
    lines = SGE.directives(request("tsubame4", nodes=2, time_s=profile.defaults.time))
    assert "-l node_f=2" in lines and "-l h_rt=1:00:00" in lines


def test_no_job_asks_for_a_warning_signal():
    assert not any("-notify" in line for line in SGE.directives(request()))


@pytest.mark.parametrize("run_id, name", [("gpt-1", "gpt-1"), ("3b-1", "j3b-1")])
def test_names_do_not_begin_with_a_digit(run_id, name):
    assert SGE.job_name(run_id) == name


@pytest.mark.parametrize(
    "output",
    [
        'Your job 41 ("gpt-1") has been submitted\n',
        '5000 points are left\n\nYour job 41 ("41.sh") has been submitted\nSee qstat.\n',
        'Your job-array 41.1-4:1 ("is-an-array") has been submitted\n',
        "41\n",
        "warning: site check: 80 slots\n41.1-4:1\n",
    ],
)
def test_job_ids(output):
    assert SGE.parse_job_id(output) == "41"


@pytest.mark.parametrize("output", ["", "Unable to run job: job 41 rejected.\n", "4 1\n"])
def test_no_job_id(output):
    with pytest.raises(SchedulerError, match="no job id"):
        SGE.parse_job_id(output)


def test_a_running_job_has_its_whole_name():
    report = LIFE["30"]
    assert (report.state, report.raw, report.name) == (JobState.RUNNING, "r", "a-name-longer-than-ten-characters")
    assert report.reason == "" and report.restarts == 0


def test_reasons_of_pending_jobs():
    assert LIFE["31"].state is JobState.PENDING
    assert LIFE["31"].reason == "waits for free nodes"
    assert LIFE["33"].reason == "waits for job 30"
    assert (LIFE["34"].raw, LIFE["34"].reason) == ("hqw", "held")
    # A job that was not asked about has only its line of the queue.
    assert (LIFE["32"].state, LIFE["32"].reason) == (JobState.PENDING, "")


def test_a_job_in_error_is_pending_with_the_reason():
    report = LIFE["28"]
    assert (report.state, report.raw) == (JobState.PENDING, "Eqw")
    assert "can't chdir to /groups/gaa50001/ada/gone: No such file or directory" in report.reason
    assert "cancel it" in report.reason
    assert 'can\'t open output file "/nonexistent/x.log"' in LIFE["29"].reason


def test_an_array_is_one_job():
    assert LIFE["36"].state is JobState.PENDING


@pytest.mark.parametrize(
    "raw, state",
    [
        *((raw, JobState.PENDING) for raw in ("qw", "hqw", "Rq", "hRwq", "Eqw", "Ehqw", "EhRqw")),
        *(
            (raw, JobState.RUNNING)
            for raw in ("r", "t", "hr", "Rr", "Rt", "s", "ts", "S", "tS", "T", "Rs", "dr", "dRt")
        ),
        *((raw, JobState.UNKNOWN) for raw in ("z", "x", "")),
    ],
)
def test_state_letters(raw, state):
    assert state_of(raw)[0] is state


def test_state_letters_with_a_reason():
    assert state_of("dr")[1] == "being deleted"
    assert state_of("S")[1] == "suspended"
    line = "   31 0.55500 gpt-26112 ada   Rr    11/21/2026 07:31:44 gpu@g0002    80\n"
    assert SGE.parse_status(line)["31"].restarts == 1


def test_a_queue_line_of_altair_with_a_class_and_a_name_with_blanks():
    # Not recorded: by qstat(1) of Univa Grid Engine, https://gridengine.eu/mangridengine/htmlman1/qstat.html
    text = (
        "job-ID     prior   name       user         state submit/start at     queue     jclass  slots ja-task-ID\n"
        + "-" * 100
        + "\n      1234 0.25000 my job x   ada          r     11/21/2026 07:31:44 gpu@r10n4                    384\n"
        "       Full jobname:     my job x: tuned\n"
    )
    report = SGE.parse_status(text)["1234"]
    assert (report.state, report.name) == (JobState.RUNNING, "my job x: tuned")


def test_an_empty_queue_is_an_empty_answer():
    assert SGE.parse_status("") == {}
    assert SGE.is_answer(0, "")


@pytest.mark.parametrize(
    "job_id, state, exit_code",
    [
        ("26", JobState.COMPLETED, 0),
        ("27", JobState.FAILED, 3),
        ("28", JobState.FAILED, None),
        ("29", JobState.FAILED, None),
        ("2", JobState.TIMEOUT, 137),
        ("25", JobState.CANCELLED, 137),
        ("30", JobState.CANCELLED, 0),
    ],
)
def test_parsed_endings(job_id, state, exit_code):
    assert (ENDED[job_id].state, ENDED[job_id].exit_code) == (state, exit_code)


def test_parsed_endings_in_words():
    assert ENDED["2"].reason == "ended by Grid Engine at its time limit"
    assert ENDED["2"].raw == "failed 37 : qmaster enforced h_rt, h_cpu, or h_vmem limit, exit_status 137 (Killed)"
    assert "run directory" in ENDED["28"].reason
    assert "job.log" in ENDED["29"].reason
    assert "by force" in ENDED["30"].reason
    assert ENDED["27"].name == "exits-with-3"


def changed(job_id, **fields):
    """Recorded account of one job with other values."""
    record = next(one for one in recorded("qacct_ended.txt").split("=" * 62) if f"jobnumber    {job_id} " in one)
    for name, value in fields.items():
        record = "\n".join(
            f"{name:<13}{value}" if line.startswith(f"{name} ") else line for line in record.splitlines()
        )
    return "=" * 62 + record + "\n"


@pytest.mark.parametrize(
    "failed, state",
    [
        ("19  : before writing exit_status", JobState.NODE_FAIL),
        ("21  : in recognizing job", JobState.NODE_FAIL),
        ("7   : before prolog", JobState.FAILED),
        ("25  : rescheduling", JobState.UNKNOWN),
        ("77  : something new", JobState.FAILED),
    ],
)
def test_codes_of_failure(failed, state):
    report = SGE.parse_accounting(changed("27", failed=failed))["27"]
    assert report.state is state and report.reason


def test_a_failed_host_is_named():
    report = SGE.parse_accounting(changed("27", failed="19  : before writing exit_status"))["27"]
    assert "g0004" in report.reason and report.exit_code is None


def test_a_limit_reached_early_is_not_the_time_limit():
    report = SGE.parse_accounting(changed("2", ru_wallclock="20s"))["2"]
    assert (report.state, report.reason) == (JobState.FAILED, "ended at a limit of memory or CPU time")


def test_a_signal_other_than_kill_is_a_failure():
    report = SGE.parse_accounting(changed("25", exit_status="139"))["25"]
    assert (report.state, report.exit_code) == (JobState.FAILED, 139)


def test_the_newest_account_of_a_reused_id_counts():
    text = changed("27") + changed("27", jobname="another", exit_status="0")
    report = SGE.parse_accounting(text)["27"]
    assert (report.name, report.state) == ("another", JobState.COMPLETED)


def test_valid_answers():
    assert SGE.is_answer(1, "error: job id 2 not found\nerror: job id 3 not found\n")
    assert SGE.is_answer(1, "Following jobs do not exist: \n99, 98\n")
    assert not SGE.is_answer(1, "")
    lost = (
        "error: commlib error: got select error (Connection refused)\n"
        'error: unable to send message to qmaster using port 6444 on host "es1": got send error\n'
    )
    assert not SGE.is_answer(1, lost)
    assert SGE.is_transient(1, lost)
    assert not SGE.is_transient(0, "")


def test_refusals_are_not_transient():
    for line in recorded("qsub_refused.txt").splitlines():
        assert not SGE.is_transient(1, line), line


@pytest.mark.parametrize(
    "message, advice",
    [
        ('Unable to run job: job rejected: the requested project "ada" does not exist', "--group"),
        ("Unable to run job: job rejected: no project assigned to job", "--group"),
        ('Unable to run job: unknown resource "rt_Q"', "resource type"),
        ('Unable to run job: Job was rejected because job requests unknown queue "nosuch.q"', "queue"),
        ("Unable to run job: the advance reservation id 77 is invalid", "qrstat"),
        ("Unable to run job: SIM4403: The amount of estimated-point 24.0 is over remaining-point.", "points"),
        ("Unable to run job: SIM4702: Specified resource(32) is over limitation(30).", "limits"),
        ("Unable to run job: SIM0021: invalid option value: -l rt_F=0", "request"),
        ("h_rt can not be longer than 10 mins with this group", "--group"),
        ('Your "qrsh" request could not be scheduled, try again later.', "no nodes are free"),
        ("something else", ""),
    ],
)
def test_advice(message, advice):
    assert advice in SGE.advice(message)
    assert bool(SGE.advice(message)) == bool(advice)


def test_every_recorded_refusal_but_usage_has_advice():
    lines = [line for line in recorded("qsub_refused.txt").splitlines() if line.startswith("Unable to run job")]
    without = [line for line in lines if not SGE.advice(line)]
    assert without == [
        'Unable to run job: denied: "1abc" is not a valid object name (cannot start with a digit)',
    ]


def test_nodes():
    nodes = {node.name: node for node in SGE.parse_nodes([recorded("qhost_q_F.txt"), recorded("qstat_f_explain.txt")])}
    assert {name: node.state for name, node in nodes.items()} == {
        "g0001": "mixed",
        "g0002": "drained",
        "g0003": "allocated",
        "g0004": "drained",
    }
    assert nodes["g0002"].reason == "disabled by an operator"
    assert nodes["g0004"].reason == "queue gpu marked QERROR as result of job 45's failure at host g0004"
    assert nodes["g0001"].cores == 2 and nodes["g0001"].memory_gib == pytest.approx(23.5)
    assert nodes["g0001"].queues == ("gpu",) and nodes["g0001"].gpus is None


def test_a_node_that_does_not_answer():
    nodes = {node.name: node for node in parse_hosts(recorded("qhost_host_down.txt"))}
    assert (nodes["g0003"].state, nodes["g0003"].raw) == ("down", "u")
    assert nodes["g0003"].reason == "the node does not answer"
    assert nodes["g0004"].state == "allocated"
