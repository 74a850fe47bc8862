"""PBS: requests, and the parsed output of its programs."""

import base64
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.backends import load_queue_backend
from llmctl.backends.pbs.interactive import ENTER, SUBMIT
from llmctl.errors import SchedulerError
from llmctl.job_state import JobState
from llmctl.paths import UserFolders
from llmctl.site.profile import ClusterProfile, ResourceType, load_profile
from tests.llmctl.backends.job_requests import request_for

RECORDED = Path(__file__).parents[2] / "recorded" / "pbs"
FOLDERS = UserFolders(home=Path("/home/ada"), config=Path("/none"), state=Path("/none"))
PBS = load_queue_backend("pbs")
assert PBS is not None
LIFE = PBS.parse_status((RECORDED / "qstat_f_life.txt").read_text())
ENDED = PBS.parse_accounting((RECORDED / "qstat_xf_ended.txt").read_text())
NODES = {node.name: node for node in PBS.parse_nodes([(RECORDED / "pbsnodes_a.txt").read_text()])}


def request(cluster="abci3", **changes):
    profile = load_profile(FOLDERS, cluster)
    given = {
        "profile": profile,
        "job_name": "gpt-261121-101500-ab12",
        "run_dir": "/groups/g/a/llmctl-runs/gpt-261121-101500-ab12",
        "nodes": 2,
        "ranks_per_node": 8,
        "gpus_per_node": 8,
        "time_s": 90061,
        "resource_type": profile.defaults.resource_type,
        "group": "gaa50000",
    }
    return request_for(**{**given, **changes})


def options(asked):
    return dict(line.split(" ", 1) for line in PBS.directives(asked) if not line.startswith(("-l", "-W")))


def test_resources_group_and_queue_of_abci3():
    lines = PBS.directives(request())
    assert "-l select=2:mpiprocs=8" in lines
    assert "-l walltime=25:01:01" in lines
    assert options(request()) == {
        "-N": "gpt-261121-101500-ab12",
        "-P": "gaa50000",
        "-q": "rt_HF",
        "-S": "/bin/bash",
        "-j": "oe",
        "-k": "oed",
        "-r": "y",
        "-v": "USE_SSH=1",
    }


def test_a_reservation_is_a_queue_and_gets_the_type_as_a_variable():
    asked = options(request(reservation="R1234.pbs1", queue="rt_HF"))
    assert asked["-q"] == "R1234"
    # A single -v, because qsub uses only the last one.
    assert asked["-v"] == "USE_SSH=1,RTYPE=rt_HF"


def test_miyabi_takes_the_group_by_group_list():
    lines = PBS.directives(request("miyabi", ranks_per_node=1, gpus_per_node=1, group="gx12"))
    assert "-W group_list=gx12" in lines
    assert "-q regular-g" in lines
    assert not [line for line in lines if line.startswith("-P")]


def test_priority_dependency_and_an_explicit_queue():
    asked = request(priority=1, after=("12.pbs1", "13.pbs1"), queue="rt_HG")
    lines = PBS.directives(asked)
    assert {"-p 1", "-W depend=afterany:12.pbs1:13.pbs1", "-q rt_HG"} <= set(lines)
    assert "-W depend=afterok:12.pbs1:13.pbs1" in PBS.directives(replace(asked, after_any=False))


def test_a_site_can_add_resources_to_each_node():
    profile = ClusterProfile(
        name="x",
        scheduler="pbs",
        options=("-l place=scatter:excl", "-v A=1"),
        resource_types={"gpu": ResourceType(gpus=4, options=("-l select=:ncpus=64:ngpus=4", "-v B=2"))},
    )
    lines = PBS.directives(request(profile=profile, resource_type="gpu", nodes=3, ranks_per_node=4))
    assert [line for line in lines if line.startswith(("-l", "-v"))] == [
        "-l select=3:mpiprocs=4:ncpus=64:ngpus=4",
        "-l walltime=25:01:01",
        "-v A=1,B=2",
        "-l place=scatter:excl",
    ]


def test_paths_are_on_no_command_line():
    (command,) = PBS.submit_commands(request(run_dir="/groups/a b/$(id)"))
    assert command.argv == ("qsub", "-o", "job.log", "job.sh")


@pytest.mark.parametrize(
    ("printed", "job_id"),
    [
        ("1234.pbs1\n", "1234.pbs1"),
        ("1234[].pbs1\n", "1234.pbs1"),
        ("Welcome to 3.0\n*** maintenance on 2026.11.30\n\n1234.pbs-server-01.site.jp\n", "1234.pbs-server-01.site.jp"),
    ],
)
def test_the_job_id_is_parsed_among_other_output(printed, job_id):
    assert PBS.parse_job_id(printed) == job_id


@pytest.mark.parametrize("printed", ["", "qsub: Unknown queue\n", "1234\n", "R1234.pbs1 UNCONFIRMED\n"])
def test_a_missing_job_id_is_an_error_that_quotes_the_output(printed):
    with pytest.raises(SchedulerError) as caught:
        PBS.parse_job_id(printed)
    assert repr(printed) in caught.value.message


@pytest.mark.parametrize(
    ("job_id", "state", "reason"),
    [
        ("1200.pbs1", JobState.PENDING, "Not enough free nodes available"),
        ("1201.pbs1", JobState.RUNNING, ""),
        ("1202.pbs1", JobState.PENDING, "waits for the end of 1201.pbs1"),
        ("1203.pbs1", JobState.PENDING, "held by its owner, held by an operator"),
        ("1204.pbs1", JobState.PENDING, "job held, too many failed attempts to run"),
        ("1205.pbs1", JobState.PENDING, "waits for its start time or its files"),
        ("1206.pbs1", JobState.RUNNING, "suspended by the scheduler"),
        ("1207.pbs1", JobState.RUNNING, ""),
        ("1208.pbs1", JobState.RUNNING, "its nodes are being cleaned up"),
        ("1209.pbs1", JobState.UNKNOWN, ""),
        ("1210.pbs1", JobState.PENDING, "Can Never Run: Insufficient amount of resource: ncpus (R: 384 A: 192 T: 192)"),
    ],
)
def test_states_and_reasons_in_the_queue(job_id, state, reason):
    assert (LIFE[job_id].state, LIFE[job_id].reason) == (state, reason)


def test_other_fields_of_the_queue():
    assert LIFE["1200.pbs1"].name == "gpt-261121-101500-ab12"
    assert LIFE["1200.pbs1"].expected_start == "Sat Nov 21 15:00:00 2026"
    assert LIFE["1210.pbs1"].expected_start is None
    assert LIFE["1201.pbs1"].hosts == tuple(f"hnode00{number}" for number in range(1, 7))
    assert LIFE["1208.pbs1"].hosts == ("hnode011", "hnode012")
    assert (LIFE["1201.pbs1"].restarts, LIFE["1208.pbs1"].restarts, LIFE["1200.pbs1"].restarts) == (0, 2, None)
    assert LIFE["1209.pbs1"].raw == "Z"


@pytest.mark.parametrize(
    ("job_id", "state", "exit_code", "reason"),
    [
        ("900.pbs1", JobState.COMPLETED, 0, ""),
        ("901.pbs1", JobState.FAILED, 1, ""),
        ("902.pbs1", JobState.TIMEOUT, None, "it reached its time limit"),
        ("903.pbs1", JobState.CANCELLED, 143, ""),
        (
            "904.pbs1",
            JobState.CANCELLED,
            None,
            "Not Running: Not enough free nodes available and terminated by aaa10000@login1",
        ),
        ("905.pbs1", JobState.FAILED, 137, ""),
        ("906.pbs1", JobState.TIMEOUT, 143, "it reached its time limit"),
        ("907.pbs1", JobState.NODE_FAIL, None, "the connection to its head node was lost"),
        ("908.pbs1", JobState.FAILED, None, "it used more memory than it had asked for"),
        ("909.pbs1", JobState.FAILED, None, "PBS ended it, its code -77"),
        ("911.pbs1", JobState.COMPLETED, 0, ""),
    ],
)
def test_parsed_endings_of_jobs(job_id, state, exit_code, reason):
    report = ENDED[job_id]
    assert (report.state, report.exit_code, report.reason) == (state, exit_code, reason)


def test_a_job_moved_to_another_server_has_not_ended():
    assert ENDED["910.pbs1"].state is JobState.UNKNOWN
    assert ENDED["910.pbs1"].reason == 'Job has been moved to "rt_HF@pbs2"'


def test_an_older_server_reports_a_deleted_job_by_its_signal_alone():
    text = "Job Id: 5.s\n    job_state = F\n    Exit_status = 271\n"
    assert PBS.parse_accounting(text)["5.s"].state is JobState.CANCELLED


def test_a_job_that_is_unknown_does_not_hide_the_others():
    known = "Job Id: 8.pbs1\n    Job_Name = x\n    job_state = R\n\n"
    assert PBS.is_answer(153, "qstat: Unknown Job Id 9.pbs1\n")
    assert set(PBS.parse_status(known)) == {"8.pbs1"}


@pytest.mark.parametrize(
    ("status", "stderr", "is_answer", "is_transient"),
    [
        (0, "", True, False),
        (0, "qstat: PBS is not configured to maintain job history\n", True, False),
        (153, "qstat: Unknown Job Id 9.pbs1\nqstat: Unknown Job Id 10.pbs1\n", True, False),
        (
            35,
            "qstat: 9.pbs1 Job has finished, use -x or -H to obtain historical job information\n",
            True,
            False,
        ),
        (255, "Connection refused\nqstat: cannot connect to server pbs1 (errno=111)\n", False, True),
        (153, "qstat: Unknown Job Id 9.pbs1\nqstat: cannot connect to server pbs1 (errno=15010)\n", False, True),
        (1, "qstat: No free connections\n", False, True),
        (127, "bash: qstat: command not found\n", False, False),
        (159, "qstat: Unauthorized Request  9.pbs1\n", False, False),
    ],
)
def test_valid_answers_and_transient_errors(status, stderr, is_answer, is_transient):
    assert PBS.is_answer(status, stderr) is is_answer
    assert PBS.is_transient(status, stderr) is is_transient


def test_advice_for_common_refusals():
    assert "--queue" in PBS.advice("qsub: Unknown queue\n")
    assert "--nodes" in PBS.advice("qsub: Job violates queue and/or server resource limits\n")
    assert "--group" in PBS.advice("qsub: Invalid Account\n")
    assert PBS.advice("qsub: something else\n") == ""


def test_one_call_for_any_number_of_jobs():
    ids = [f"{number}.pbs1" for number in range(1000)]
    assert PBS.status_argv(ids) == ["qstat", "-E", "-f", *ids]
    assert PBS.accounting_argv(ids) == ["qstat", "-x", "-E", "-f", *ids]
    assert [command.argv for command in PBS.cancel_commands(["1.pbs1"])] == [("qdel", "1.pbs1")]


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("hnode001", "allocated"),
        ("hnode002", "mixed"),
        ("hnode003", "idle"),
        ("hnode004", "drained"),
        ("hnode005", "draining"),
        ("hnode006", "down"),
        ("hnode007", "allocated"),
        ("hnode008", "unknown"),
    ],
)
def test_states_of_nodes(name, state):
    assert NODES[name].state == state


def test_other_fields_of_nodes():
    assert set(NODES) == {f"hnode00{number}" for number in range(1, 9)}
    first = NODES["hnode001"]
    assert (first.gpus, first.gpus_used, first.cores, first.cores_used) == (8, 8, 192, 192)
    assert (first.memory_gib, NODES["hnode002"].memory_gib, NODES["hnode003"].memory_gib) == (2015.6, 1920.0, 1024.0)
    assert (first.queues, NODES["hnode002"].queues) == (("rt_HF",), ("rt_HG", "rt_HC"))
    assert NODES["hnode004"].reason == "ECC errors on GPU 3, ticket 4711 = waits for a part"
    assert (NODES["hnode006"].raw, NODES["hnode007"].reason) == ("state-unknown,down", "")


def test_attach_works_with_any_login_shell_on_the_node():
    odd = ["a b", "$(id)", "'", '"!', "-x", "", "*", "line\nline", os.fsdecode(b"\xff")]
    argv = PBS.attach_argv("12.pbs1", "hnode001", 'printf "%s\\0" "$@"', odd)
    assert argv[:2] == ["bash", "-c"]
    assert argv[4] == "hnode001"
    assert "\n" not in argv[5]
    assert "!" not in argv[5]
    done = subprocess.run(["sh", "-c", argv[5]], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in odd]


def test_arguments_of_attach_are_plain_words():
    argv = PBS.attach_argv("12.pbs1", "hnode001", "exit 3", ["x"])
    word = argv[5].partition("<<<")[2].partition(")")[0]
    assert base64.b64decode(word) == b"exit 3\0bash\0x\0"
    assert subprocess.run(["sh", "-c", argv[5]], check=False).returncode == 3


def test_an_interactive_job_is_requested_like_a_batch_job():
    argv = PBS.interactive_argv(request(reservation="R1234"), "exit 3", ["a b"])
    count = int(argv[7])
    assert argv[8 : 8 + count] == [
        *("-P", "gaa50000", "-q", "R1234", "-l", "select=2:mpiprocs=8", "-l", "walltime=25:01:01"),
        *("-v", "USE_SSH=1,RTYPE=rt_HF"),
    ]
    assert argv[8 + count :] == ["exit 3", "bash", "a b"]
    assert argv[5] == "2 x rt_HF in reservation R1234 for 25:01:01"


@pytest.mark.programs("shellcheck")
@pytest.mark.parametrize("script", [SUBMIT, ENTER])
def test_shellcheck_finds_no_problem(script):
    done = subprocess.run(["shellcheck", "-s", "bash", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.stdout == ""
