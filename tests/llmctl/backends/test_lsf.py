"""LSF: directives, and parsed output that was recorded elsewhere; no test uses a real LSF."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.backends import load_queue_backend
from llmctl.backends.lsf.interactive import ENTER, SUBMIT
from llmctl.backends.lsf.reports import FIELDS
from llmctl.errors import SchedulerError
from llmctl.job_state import JobState
from llmctl.site.profile import ClusterProfile, ResourceType
from tests.llmctl.backends.job_requests import request_for

RECORDED = Path(__file__).parents[2] / "recorded" / "lsf"
LSF = load_queue_backend("lsf")
assert LSF is not None
GPU = ResourceType(gpus=8, cores=96, queue="normal")
PROFILE = ClusterProfile(name="x", scheduler="lsf", resource_types={"gpu": GPU}, runs_root="/runs")
REQUEST = request_for(
    PROFILE,
    job_name="gpt-261121-101500-ab12",
    run_dir="/runs/a b/$(id)",
    nodes=2,
    ranks_per_node=8,
    gpus_per_node=8,
    time_s=90061,
    resource_type="gpu",
    group="proj",
)
ENV = '-env "PATH, LSF_BINDIR, LSF_ENVDIR, LSF_LIBDIR, LSF_SERVERDIR"'
COLUMNS = (
    *("jobid", "stat", "exit_reason", "exec_host", "user", "slots", "max_req_proc", "exec_host", "queue"),
    *("finish_time", "start_time", "%complete", "submit_time", "job_name"),
)
"""Columns of bjobs_columns.txt. llmctl queries other columns; a value that was not recorded is unset here."""


LIMIT = "job killed after reaching LSF run time limit"


def text(name):
    return (RECORDED / name).read_text()


def in_queried_columns(line):
    values = dict(zip(COLUMNS, line.split("|"), strict=True))
    return "|".join(values.get(field, "-") for field in FIELDS)


QUEUE = LSF.parse_status("\n".join(in_queried_columns(line) for line in text("bjobs_columns.txt").splitlines()))
HISTORY = LSF.parse_accounting(text("bhist_ended.txt") + text("bhist_documented.txt") + text("bacct_killed.txt"))


def test_directives_of_a_job():
    assert LSF.directives(REQUEST) == [
        "-J gpt-261121-101500-ab12",
        "-n 192",
        '-R "span[ptile=96]"',
        '-gpu "num=8:j_exclusive=yes"',
        "-W 25:02",
        "-q normal",
        "-P proj",
        ENV,
        "-o job.log",
        "-r",
    ]


def test_optional_directives():
    kind = GPU.model_copy(update={"gpu_type": "NVIDIAH10080"})
    asked = replace(
        REQUEST,
        profile=PROFILE.model_copy(update={"group_option": "-G"}),
        resource=kind,
        site_options=('-R "select[type==any]"', "-x"),
        queue="short",
        reservation="mine",
        priority=7,
        after=("12", "13"),
    )
    lines = LSF.directives(asked)
    assert {"-q short", "-U mine", "-G proj", "-sp 7", "-x", '-R "select[type==any]"'} <= set(lines)
    assert '-gpu "num=8:j_exclusive=yes:gmodel=NVIDIAH10080"' in lines
    assert lines[-1] == '-w "ended(12) && ended(13)"'
    assert LSF.directives(replace(asked, after_any=False))[-1] == '-w "done(12) && done(13)"'


def test_a_cpu_job_without_known_cores_asks_for_a_slot_per_rank():
    kind = GPU.model_copy(update={"cores": None})
    asked = replace(REQUEST, gpus_per_node=0, resource=kind, ranks_per_node=4, group=None, time_s=None)
    assert LSF.directives(asked)[1:4] == ["-n 8", '-R "span[ptile=4]"', "-q normal"]


def test_the_script_is_on_standard_input_and_paths_on_no_command_line():
    (command,) = LSF.submit_commands(REQUEST)
    assert command.argv == ("sh", "-c", "exec bsub <job.sh")


def test_priorities_begin_at_one():
    assert LSF.priority_problem(1) == ""
    assert "below 1" in LSF.priority_problem(0)


@pytest.mark.parametrize(
    ("printed", "job_id"),
    [
        ("Job <764254593> is submitted to queue <test>.\n", "764254593"),
        ("Job <228> is submitted to default queue <normal>.\n", "228"),
        ("Your job requests 12 slots per GPU.\nJob <4242> is submitted to queue <gpu_h100>.\n", "4242"),
        (text("bsub_interactive.txt"), "1223"),
    ],
)
def test_the_job_id_is_parsed_among_messages_of_the_site(printed, job_id):
    assert LSF.parse_job_id(printed) == job_id


@pytest.mark.parametrize("printed", ["", "Request aborted by esub. Job not submitted.\n", text("bsub_refused.txt")])
def test_a_missing_job_id_is_an_error_that_quotes_the_output(printed):
    with pytest.raises(SchedulerError) as caught:
        LSF.parse_job_id(printed)
    assert repr(printed) in caught.value.message


@pytest.mark.parametrize(
    ("job_id", "state", "raw", "reason", "hosts"),
    [
        ("764213236", JobState.TIMEOUT, "EXIT TERM_RUNLIMIT", LIMIT, "b681e480bd"),
        ("764220165", JobState.PENDING, "PEND", "", ""),
        ("764254593", JobState.RUNNING, "RUN", "", "lxbsu2710"),
        ("764399747", JobState.COMPLETED, "DONE", "", "p05496706j68144"),
    ],
)
def test_recorded_jobs_of_the_queue(job_id, state, raw, reason, hosts):
    report = QUEUE[job_id]
    assert (report.state, report.raw, report.reason) == (state, raw, reason)
    assert report.hosts == ((hosts,) if hosts else ())
    assert len(QUEUE) == 7
    assert (QUEUE["764220165"].name, QUEUE["764399747"].exit_code) == ("aiida-1033444", 0)


@pytest.mark.parametrize(
    ("values", "state", "exit_code", "reason", "hosts"),
    [
        ("PEND|-|-|-|x|Not enough hosts | or slots", JobState.PENDING, None, "Not enough hosts | or slots", ()),
        ("PSUSP|-|-|-|x|-", JobState.PENDING, None, "held by its owner or an administrator", ()),
        ("SSUSP|-|-|16*n1:16*n2|x|-", JobState.RUNNING, None, "suspended by LSF", ("n1", "n2")),
        ("UNKWN|-|-|n1|x|-", JobState.UNKNOWN, None, "LSF has lost contact with its first host", ("n1",)),
        ("NEW|-|-|-|x|-", JobState.UNKNOWN, None, "", ()),
        ("EXIT|130|TERM_OWNER: job killed by owner|-|x|-", JobState.CANCELLED, 130, "job killed by owner", ()),
        ("EXIT|3|-|n1|x|-", JobState.FAILED, 3, "", ("n1",)),
        ("EXIT|137|TERM_MEMLIMIT: job killed|n1|x|-", JobState.FAILED, 137, "job killed", ("n1",)),
    ],
)
def test_states_of_the_manual(values, state, exit_code, reason, hosts):
    report = LSF.parse_status(f"Cannot connect to LSF. Please wait ...\n17|{values}\n")["17"]
    assert (report.state, report.exit_code, report.reason, report.hosts) == (state, exit_code, reason, hosts)


@pytest.mark.parametrize(
    ("job_id", "state", "exit_code", "hosts"),
    [
        ("872795", JobState.COMPLETED, 0, ("hx-noah-05-14",)),
        ("873209", JobState.FAILED, 127, ("hx-noah-10-04",)),
        ("3224113", JobState.CANCELLED, None, ("a3191",)),
        ("1", JobState.CANCELLED, 130, ("node62",)),
        ("2", JobState.TIMEOUT, 130, ("hostA",)),
        ("3", JobState.FAILED, 143, ("hostA",)),
        ("4", JobState.NODE_FAIL, None, ("hostA",)),
    ],
)
def test_parsed_endings_of_jobs(job_id, state, exit_code, hosts):
    report = HISTORY[job_id]
    assert (report.state, report.exit_code, report.hosts) == (state, exit_code, hosts)


def test_other_fields_of_the_history():
    assert HISTORY["1"].name == "gpt-261121-101500-ab12"
    assert HISTORY["2"].reason == LIMIT
    assert HISTORY["873209"].raw == "Exited with exit code 127"
    # Requeued and started again: the job has not ended.
    assert "5" not in HISTORY


@pytest.mark.parametrize(
    ("status", "stderr", "is_answer", "is_transient"),
    [
        (0, "", True, False),
        (255, "Job <864220165> is not found\n", True, False),
        (255, "No unfinished job found\n", True, False),
        (255, "No matching job found\n", True, False),
        (255, "LSF is down. Please wait ...\n", False, True),
        (255, "Job <1> is not found\nCannot connect to LSF. Please wait ...\n", False, True),
        (127, "bash: bjobs: command not found\n", False, False),
    ],
)
def test_valid_answers_and_transient_errors(status, stderr, is_answer, is_transient):
    assert LSF.is_answer(status, stderr) is is_answer
    assert LSF.is_transient(status, stderr) is is_transient


@pytest.mark.parametrize("message", text("bsub_refused.txt").splitlines())
def test_every_recorded_refusal_has_advice_and_is_permanent(message):
    assert LSF.advice(message)
    assert not LSF.is_transient(255, message)


def test_one_call_for_any_number_of_jobs():
    ids = [str(number) for number in range(1000)]
    fields = "jobid stat exit_code exit_reason exec_host job_name pend_reason delimiter='|'"
    asks = ["bjobs", "-a", "-noheader", "-o", fields]
    assert LSF.status_argv(ids) == [*asks, *ids]
    assert LSF.find_argv("gpt") == [*asks, "-J", "gpt"]
    assert LSF.accounting_argv(ids) == ["bhist", "-n", "0", "-l", *ids]
    assert [command.argv for command in LSF.cancel_commands(["1", "2"])] == [("bkill", "1", "2")]


def test_recorded_hosts():
    (argv,) = LSF.nodes_argv()
    assert argv == ["bhosts", "-w", "-X"]
    nodes = LSF.parse_nodes([text("bhosts_w.txt")])
    assert [(node.name.partition("-9")[0], node.state, node.cores) for node in nodes] == [
        ("test-re1-comp-1", "idle", 8),
        ("test-re1-mgmt-1", "allocated", 0),
        ("test-re1-mgmt-1", "allocated", 0),
    ]


@pytest.mark.parametrize(
    ("status", "jobs", "state"),
    [
        ("ok", 2, "mixed"),
        ("closed_Adm", 0, "drained"),
        ("closed_Adm", 2, "draining"),
        ("unavail", 0, "down"),
        ("unreach", 2, "down"),
        ("closed_New", 0, "unknown"),
    ],
)
def test_states_of_hosts(status, jobs, state):
    heading = text("bhosts_w.txt").splitlines()[0]
    (node,) = LSF.parse_nodes([f"{heading}\nhostB {status} - 55 {jobs} {jobs} 0 0 0\n"])
    assert (node.state, node.raw, node.cores_used) == (state, status, jobs)


@pytest.mark.parametrize("code", [0, 3])
def test_an_interactive_job_passes_script_command_and_exit_code_unchanged(tmp_path, code):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "bsub").write_text('#!/bin/bash\nprintf "%s\\n" "$@" >"$RECORD"\nexec sh -c "${!#}"\n')
    (programs / "bsub").chmod(0o755)
    profile = PROFILE.model_copy(update={"runs_root": str(tmp_path / "it's here")})
    argv = LSF.interactive_argv(replace(REQUEST, profile=profile), f'printf "%s|" "$@"; exit {code}', ["a b", "it's"])
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record"), "HOME": str(tmp_path)}
    done = subprocess.run(argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("a b|it's|", code)
    words = (tmp_path / "record").read_text().splitlines()
    assert words[:5] == ["-I", "-J", REQUEST.job_name, "-n", "192"]
    assert "PATH, LSF_BINDIR, LSF_ENVDIR, LSF_LIBDIR, LSF_SERVERDIR" in words
    assert list((tmp_path / "it's here").iterdir()) == []


def test_attach_to_a_running_job_uses_ssh():
    argv = LSF.attach_argv("12", "n1", "exit 3", ["x"])
    assert argv[4] == "n1" and "ssh" in argv[2]
    assert subprocess.run(["sh", "-c", argv[5]], check=False).returncode == 3


@pytest.mark.programs("shellcheck")
@pytest.mark.parametrize("script", [SUBMIT, ENTER])
def test_shellcheck_finds_no_problem(script):
    done = subprocess.run(["shellcheck", "-s", "bash", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.stdout == ""
