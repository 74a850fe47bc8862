"""Ends of ranks that no request reaches: stopped ones with a session of their own, as torchrun's ranks have."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from llmctl.paths import PACKAGE
from llmctl.supervisor import processes
from llmctl.supervisor.ends import read_ends
from tests.llmctl.supervisor.test_supervisor import PYTHON, ending, run_job
from tests.waiting import HANG_S, wait_for

PARTS = """
if [[ $1 == rank && $NODE_RANK == 0 ]]; then
    until [[ -e $LLMCTL_RUN_DIR/stopped ]]; do sleep 0.1; done; exit 7
elif [[ $1 == rank ]]; then
    trap '' TERM
    setsid bash -c 'echo $$ >"$LLMCTL_RUN_DIR/stopped"; kill -STOP $$' &
    while :; do sleep 0.1; done
fi
"""
"""Node 0 fails once the rank of node 1, whose agent does not end when it is asked, is stopped."""


@pytest.mark.parametrize("how", ["file", "command"])
def test_a_failure_ends_a_node_that_does_not_react(tmp_path, how):
    """Its launcher is not killed first: the command would go on unwatched, or the scheduler end the whole job."""
    launch = (
        f'printf "A=1\\nA=2\\n" >"$LLMCTL_HOSTFILE"\nexec "{PYTHON}" -IB "{PACKAGE}/supervisor" each-host '
        f'--end-by {how} --first-here env -i "PATH=$PATH" %h bash "{tmp_path}/job.sh" "" --end-by {how} node 1 - - %n\n'
    )
    job = run_job(tmp_path, PARTS + launch, "--end-by", how, is_training=True, nodes=2, stop_grace_s=int(HANG_S))
    assert job.wait(HANG_S) == 7
    ends = read_ends(str(tmp_path / "attempts/1"))
    assert (ends["node-00000"].code, ends["node-00001"].signal) == (7, signal.SIGKILL)
    assert ending(tmp_path)["reason"] == "failed"
    pid = int((tmp_path / "stopped").read_text())
    wait_for(lambda: not Path(f"/proc/{pid}/exe").exists(), "the end of the rank")


def test_the_processes_of_one_node_are_killed_with_their_sessions(tmp_path):
    own = {**os.environ, "LLMCTL_RUN_DIR": str(tmp_path), "LLMCTL_ATTEMPT": "1"}
    argv = ["bash", "-c", "kill -STOP $$"]
    zero, one = (
        subprocess.Popen(argv, env={**own, "NODE_RANK": str(node)}, start_new_session=True) for node in range(2)
    )
    try:
        processes.kill_node(str(tmp_path), 1, 1)
        assert one.wait(HANG_S) == -signal.SIGKILL and zero.poll() is None
    finally:
        for left in (zero, one):
            left.kill()
            left.wait()


def test_a_killed_agent_leaves_no_stopped_rank(tmp_path):
    folder = tmp_path / "attempts/1"
    folder.mkdir(parents=True)
    rank = 'echo $$ >"$LLMCTL_RUN_DIR/stopped"; kill -STOP $$'
    wait = "until [[ -e $LLMCTL_RUN_DIR/stopped ]]; do sleep 0.1; done"
    (folder / "job.sh").write_text(f"setsid bash -c '{rank}' &\n{wait}; kill -KILL $$\n")
    assert run_job(tmp_path, "", "node", "1", "-", "-", "1", is_training=True).wait(HANG_S) == 137
    pid = int((tmp_path / "stopped").read_text())
    try:
        # A killed process may take a moment to end; a stopped one stays.
        wait_for(lambda: not Path(f"/proc/{pid}/exe").exists(), "the end of the rank")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert read_ends(str(folder))["node-00001"].signal == signal.SIGKILL


@pytest.mark.parametrize("end_by", ["file", "command"])
def test_the_launcher_of_the_ranks_dies_with_the_process_that_watches_it(tmp_path, end_by):
    """A scheduler may kill that process alone; the ranks end by themselves once their launcher is gone."""
    folder = tmp_path / "attempts/1"
    folder.mkdir(parents=True)
    (folder / "job.sh").write_text(
        "exec bash -c 'echo $$ >\"$LLMCTL_RUN_DIR/launcher\"; while :; do sleep 0.1; done'\n"
    )
    job = run_job(tmp_path, "", "--end-by", end_by, "node", "1", "-", "-", "1", is_training=True)
    wait_for(lambda: (tmp_path / "launcher").exists() and (tmp_path / "launcher").read_text(), "the launcher")
    pid = int((tmp_path / "launcher").read_text())
    try:
        assert Path(f"/proc/{pid}/exe").exists()
        job.kill()
        assert job.wait(HANG_S) == -signal.SIGKILL
        wait_for(lambda: not Path(f"/proc/{pid}/exe").exists(), "the end of the launcher")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
