"""Grid Engine: the shell around its programs, run with stand-ins for qstat, qacct, qrsh and ssh."""

import subprocess
from dataclasses import replace

import pytest

from llmctl.backends.sge import backend
from llmctl.job_state import JobState
from llmctl.runs.scheduler_query import read_accounting
from llmctl.transport.local import LocalTransport
from tests.llmctl.backends.test_sge import RECORDED, SGE, request
from tests.waiting import HANG_S


def run_with(tmp_path, argv, **programs):
    """Run a backend's command with stand-ins for Grid Engine's programs."""
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return subprocess.run(
        argv, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, timeout=HANG_S, stdin=subprocess.DEVNULL
    )


QSTAT = f"""echo "$*" >>"$(dirname "$0")/calls"
if [[ $1 == -r ]]; then cat {RECORDED}/qstat_life.txt | sed '/^===/,$d'; fi"""


def test_one_query_for_the_queue_and_one_for_pending_reasons(tmp_path):
    done = run_with(tmp_path, SGE.status_argv(["28", "30", "31", "99"]), qstat=QSTAT)
    assert done.returncode == 0
    assert len(SGE.parse_status(done.stdout.decode())) == 9
    assert (tmp_path / "calls").read_text().splitlines() == ["-r -u $user", "-j 28,31"]


def test_a_queue_without_pending_jobs_is_queried_once(tmp_path):
    assert run_with(tmp_path, SGE.status_argv(["30"]), qstat=QSTAT).returncode == 0
    assert (tmp_path / "calls").read_text().splitlines() == ["-r -u $user"]


def test_a_queue_that_does_not_answer(tmp_path):
    done = run_with(tmp_path, SGE.status_argv(["28"]), qstat="echo 'error: commlib error: refused' >&2; exit 1")
    assert done.returncode == 1 and not SGE.is_answer(done.returncode, done.stderr.decode())


def test_the_accounting_is_queried_for_all_jobs(tmp_path):
    text = f'if [[ $2 == 99 ]]; then echo "error: job id 99 not found" >&2; exit 1; fi; cat {RECORDED}/qacct_ended.txt'
    done = run_with(tmp_path, SGE.accounting_argv(["99", "26"]), qacct=text)
    assert SGE.is_answer(done.returncode, done.stderr.decode())
    assert SGE.parse_accounting(done.stdout.decode())["26"].state is JobState.COMPLETED


def test_a_slow_accounting_reports_the_newest_jobs_first(tmp_path, monkeypatch):
    text = f'echo "$2" >>"$(dirname "$0")/asked"; if [[ $2 == 9 ]]; then sleep 3000; fi; cat {RECORDED}/qacct_ended.txt'
    (tmp_path / "qacct").write_text(f"#!/bin/bash\n{text}\n")
    (tmp_path / "qacct").chmod(0o755)
    transport = LocalTransport({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    asked: list[str] = []
    for limit_s in (2, 16, 128):  # On a busy machine even the first job may take longer.
        monkeypatch.setattr(backend, "ACCOUNTING_S", limit_s)
        (tmp_path / "asked").write_text("")
        answer = read_accounting(SGE, ["8", "9", "26"], transport)
        asked = (tmp_path / "asked").read_text().split()
        if len(asked) > 1:
            break
    assert asked == ["26", "9"]
    assert answer.reports["26"].state is JobState.COMPLETED
    assert (answer.is_answer, answer.problem) == (
        False,
        "qacct is slow: it was asked about 1 of 3 jobs, the newest first",
    )


QRSH = """while [[ $1 == -* ]]; do
    echo "$1 ${2-}" >>"$(dirname "$0")/options"
    if [[ $1 == -inherit || $1 == -nostdin ]]; then shift; else shift 2; fi
done
if [[ $1 == g0002 ]]; then echo "$JOB_ID" >>"$(dirname "$0")/options"; shift; fi
exec /bin/sh -c "$*" """


@pytest.mark.parametrize("words", [["it's", 'a "b" $HOME `id`', "two\nlines", "-x", "\\", "!", "é", ""]])
def test_a_command_reaches_the_node_unchanged(tmp_path, words):
    argv = SGE.interactive_argv(request(nodes=1), 'printf "%s\\0" "$@"; exit 7', words)
    done = run_with(tmp_path, argv, qrsh=QRSH)
    assert done.stdout.decode().split("\0")[:-1] == words
    assert done.returncode == 7
    assert (
        done.stderr.decode()
        == "llmctl: requesting 1 node of rt_F from Grid Engine, which refuses at once if none is free\n"
    )
    options = (tmp_path / "options").read_text()
    assert "-g gaa50001\n" in options and "-l rt_F=1\n" in options and "-now yes\n" in options


def test_an_attached_command_is_a_task_of_the_job(tmp_path):
    argv = SGE.attach_argv("41", "g0002", 'printf "%s\\0" "$@"; kill -KILL $$', ["a b", "it's"])
    done = run_with(tmp_path, argv, qrsh=QRSH)
    assert done.stdout.decode().split("\0")[:-1] == ["a b", "it's"]
    # qrsh itself must survive: otherwise Grid Engine would end the job.
    assert done.returncode == 137
    assert "41\n" in (tmp_path / "options").read_text()


def test_attach_uses_ssh_if_the_job_takes_no_tasks(tmp_path):
    argv = SGE.attach_argv("41", "g0002", 'echo "$@"; exit 5', ["a  b"])
    ssh = 'if [[ $1 == -T && $2 == g0002 ]]; then exec /bin/sh -c "$3"; fi; exit 99'
    done = run_with(tmp_path, argv, qrsh="exit 1", ssh=ssh)
    assert (done.stdout, done.returncode) == (b"a  b\n", 5)


def test_interactive_without_a_group():
    argv = SGE.interactive_argv(replace(request(), group=None), "true", [])
    assert "-g" not in argv
