"""Nodes that cannot start the program of a run: as tables, and with real processes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from llmctl.paths import PACKAGE
from llmctl.supervisor.causes.starts import NOBODY, NodeStart, find_unstarted, is_shells_end
from llmctl.supervisor.ends import PartEnd, read_ends
from llmctl.supervisor.restarts import Failure, RankFailure, class_of, culprits_of
from llmctl.supervisor.spares.choice import Choice, choose
from llmctl.supervisor.spares.faults import fault_values, unstarted_again
from tests.llmctl.supervisor.test_supervisor import PYTHON, ending, run_job, settings
from tests.waiting import HANG_S

SCRIPT = "/runs/r/attempts/1/job.sh"
DENIED = (
    f"{SCRIPT}: line 9: /v/python: Permission denied\n"
    f"{SCRIPT}: line 9: exec: /v/python: cannot execute: Permission denied\n"
)
GONE = f"{SCRIPT}: line 9: exec: /v/python: cannot execute: No such file or directory\n"
OLD = f"{SCRIPT}: line 9: /v/python: No such file or directory\n"
NO_PYTHON = "llmctl: head has no python3 of version 3.6 or later, which starts and watches the ranks: ask the site\n"
NO_SCRIPT = f"bash: {SCRIPT}: No such file or directory\n"


def good(host: str, code: int = 143) -> NodeStart:
    return NodeStart(host, started=True, code=code, time=9.0)


def bad(host: str, output: str = DENIED, code: int = 126) -> NodeStart:
    return NodeStart(host, started=False, code=code, time=5.0, output=output)


def silent(host: str) -> NodeStart:
    return NodeStart(host, has_begun=False)


def ended(tasks: str, code: int) -> str:
    return f"srun: error: n[2-3]: tasks {tasks}: Exited with exit code {code}\n"


@pytest.mark.parametrize(
    ("nodes", "log", "sentence"),
    [
        (
            (good("n1"), bad("n2"), good("n3")),
            "",
            "n2 could not start /v/python: Permission denied; the other nodes started it",
        ),
        (
            (good("n1"), bad("n2", GONE, 127)),
            "",
            "n2 could not start /v/python: No such file or directory; n1 started it",
        ),
        (
            (good("n1"), bad("n2", OLD, 127)),
            "",
            "n2 could not start /v/python: No such file or directory; n1 started it",
        ),
        ((bad("n1"), good("n2")), "", "n1 could not start /v/python: Permission denied; n2 started it"),
        (
            (good("n1"), bad("n2", f"{SCRIPT}: line 3: cd: /x: No such file or directory\n", 1)),
            "",
            "n2 could not start the program: cd: /x: No such file or directory; n1 started it",
        ),
        ((good("n1"), bad("n2", "", 1)), "", "n2 could not start the program: exit code 1; n1 started it"),
        (
            (good("n1"), bad("n2"), bad("n3"), good("n4")),
            "",
            "n2 and n3 could not start /v/python: Permission denied; the other nodes started it",
        ),
        # Of a node that was ended too early nobody knows whether it could have.
        (
            (good("n1"), bad("n2"), NodeStart("n3", started=False, code=143, time=9.0)),
            "",
            "n2 could not start /v/python: Permission denied; n1 started it",
        ),
        # Before the supervisor has begun.
        (
            (NodeStart("n1"), silent("n2")),
            NO_PYTHON + ended("1", 1),
            "n2 could not start python3 of version 3.6 or later, which starts and watches the ranks: it has none; "
            "n1 started it",
        ),
        (
            (NodeStart("n1"), silent("n2"), silent("n3"), NodeStart("n4")),
            NO_SCRIPT + ended("1-2", 127),
            f"n2 and n3 could not start {SCRIPT}: No such file or directory; the other nodes started it",
        ),
        (
            (silent("n1"), silent("n2")),
            "llmctl: the part on n2 ended with exit code 127\n",
            "n2 could not start its part of the job: exit code 127; n1 started it",
        ),
    ],
)
def test_the_nodes_that_could_not_start_the_program(nodes, log, sentence):
    found = find_unstarted(nodes, log)
    assert found.sentence == sentence and all(words.startswith("could not start ") for words in found.nodes.values())


@pytest.mark.parametrize(
    ("nodes", "log", "first_error"),
    [
        ((bad("n1"), bad("n2")), "", None),
        # Most nodes cannot: the program is at fault, such as one on a disk of the first node.
        ((good("n1"), bad("n2"), bad("n3")), "", None),
        ((NodeStart("n1"), silent("n2"), silent("n3")), NO_SCRIPT + ended("1-2", 127), None),
        ((good("n1"), bad("n2")), "", 4.0),
        ((NodeStart("n1", started=None, code=127), NodeStart("n2", started=None, code=127)), "", None),
        ((good("n1"), good("n2", 127)), "", None),
        ((good("n1"), NodeStart("n2", started=False, code=143)), "", None),
        ((good("n1"), bad("n1")), "", None),
        # It has ended for another reason, or has begun.
        ((NodeStart("n1"), silent("n2")), ended("1", 1), None),
        ((NodeStart("n1"), NodeStart("n2")), NO_SCRIPT + ended("1", 127), None),
        ((NodeStart("n1"), silent("n2")), NO_SCRIPT + ended("1", 127), 4.0),
    ],
)
def test_no_node_is_blamed_for_a_fault_of_the_program(nodes, log, first_error):
    assert find_unstarted(nodes, log, first_error=first_error) == NOBODY


def test_a_task_of_srun_is_on_the_node_of_its_number():
    nodes = (NodeStart("n1"), NodeStart("n2"), silent("n3"))
    assert [*find_unstarted(nodes, ended("8-11", 127), parts=4).nodes] == ["n3"]


@pytest.mark.parametrize(
    ("code", "output", "is_one"),
    [
        (126, f"begun\n{DENIED}", True),
        (127, GONE, True),
        (1, GONE, False),
        (127, f"{GONE}more\n", False),
        (127, "train.sh: line 3: nothing: command not found\n", False),
        (127, "", False),
    ],
)
def test_the_shells_end_of_a_part(code, output, is_one):
    assert is_shells_end(code, output) is is_one


@pytest.mark.parametrize(
    ("script", "is_training", "started"),
    [
        ("exec /missing/python", True, False),
        ("exec /missing/python", False, False),
        ("exit 3", True, False),
        ("exit 3", False, None),
        ("exec bash -c 'exit 127'", False, None),
        ("exec /bin/false", True, True),
        ("exec sleep 0", False, True),
    ],
)
@pytest.mark.parametrize("more", [(), ("--end-by", "file")])
def test_a_node_records_if_its_program_has_started(tmp_path, script, is_training, started, more):
    attempt = tmp_path / "attempts/1"
    attempt.mkdir(parents=True)
    (attempt / "job.sh").write_text(script)
    run_job(tmp_path, "", *more, "node", "1", "-", "-", "0", is_training=is_training).wait(HANG_S)
    assert read_ends(str(attempt))["node-00000"].started is started


LAUNCH = """printf 'n1\\nn2\\n' >"$LLMCTL_HOSTFILE"
for node in 0 1; do
    mkdir -p "$LLMCTL_RUN_DIR/$node"
    bash "$LLMCTL_RUN_DIR/job.sh" "" node 1 - - $node &
done
wait -n
code=$?
kill $(jobs -p)
wait
exit $code
"""
"""A launch line which ends all nodes once one has ended, as srun does. A node's script is in a folder of its number."""


@pytest.mark.parametrize(("first", "kind"), [("exec sleep 1000", "node"), ("exec /missing/python", "config")])
def test_a_run_whose_second_node_cannot_start_the_program_ends_at_once(tmp_path, first, kind):
    part = f"if [[ $1 == rank ]]; then [[ $NODE_RANK == 1 ]] || {first}; exec /missing/python; fi\n"
    job = run_job(tmp_path, part + LAUNCH, is_training=True, nodes=2, max_restarts=3, restart_on=("node",))
    assert job.wait(HANG_S) == 127
    end = ending(tmp_path)
    assert end["class"] == kind, end
    if kind == "node":
        why = "could not start /missing/python: No such file or directory"
        assert end["culprits"] == ["n2"] and end["cause"] == f"n2 {why}; n1 started it" and "output" not in end
        assert end["unstarted"] == {"n2": why}
        assert end["not_restarted"] == "n2 would fail to start the program again, and the job has no spare node"
    else:
        assert "culprits" not in end and "unstarted" not in end


WHY = {"n2": "could not start /v/python: Permission denied"}


@pytest.mark.parametrize(
    ("failure", "kind", "culprits"),
    [
        (Failure(126, unstarted=WHY, output="no_program"), "node", {"culprits": ["n2"]}),
        (Failure(126, output="no_program"), "config", {}),
        (Failure(127, parts=(PartEnd(127, 0, 1.0, "n2", False),), output="file"), "config", {}),
        (Failure(127, parts=(PartEnd(127, 0, 1.0, "n2"),), output="file"), "unknown", {}),
        (Failure(1, verdict="hang", unstarted=WHY), "hang", {}),
        (Failure(1, ranks=(RankFailure("E", "", True, 1, 9.0),), unstarted=WHY), "node", {"culprits": ["n2"]}),
    ],
)
def test_the_class_is_that_of_a_node(failure, kind, culprits):
    assert (class_of(failure), culprits_of(failure)) == (kind, culprits)


def prepared(run_dir: Path, spares: int, **started: object):
    folder = run_dir / "attempts/1"
    folder.mkdir(parents=True)
    (folder / "hostfile").write_text("n1 slots=1\nn2 slots=1\n")
    (folder / "started.json").write_text(json.dumps(started))
    return settings(run_dir, nodes=2, spare_nodes=spares, is_training=True), str(folder)


@pytest.mark.parametrize(
    ("spares", "left_out", "node", "refused"),
    [
        (1, {}, "n2", ""),
        (2, {"n4": "unfit"}, "n2", ""),
        (0, {}, "n2", "n2 would fail to start the program again, and the job has no spare node"),
        (1, {"n4": "unfit"}, "n2", "n2 would fail to start the program again, and too few spare nodes are left"),
        (1, {}, "n1", "n1 could not start the program, and the first node of a job always takes part"),
    ],
)
def test_a_restart_needs_a_spare_node(tmp_path, spares, left_out, node, refused):
    job, folder = prepared(tmp_path, spares, left_out=left_out)
    assert unstarted_again(job, folder, {node: WHY["n2"]}) == refused
    assert unstarted_again(job, folder, {}) == ""


def test_the_next_attempt_leaves_the_node_out_with_its_own_cause(tmp_path):
    job, folder = prepared(tmp_path, 1)
    found = fault_values(job, folder, Failure(126, unstarted=WHY), "node", "n2 and others", ())
    assert found == {"first_node": "n2", "leaves_out": WHY}


def test_a_node_without_the_program_does_not_come_back():
    hosts = ("n1", "n2", "n3", "n4")
    assert choose(hosts, 3, {**WHY, "n3": "unfit"}, set()) == Choice(("n1", "n3", "n4"), WHY)
    shortage = "2 of 3 nodes are left for 3 to train on: n2 could not start /v/python: Permission denied"
    assert choose(hosts[:3], 3, WHY, set()) == Choice(("n1", "n3"), WHY, shortage)


def test_a_launcher_of_each_host_tells_which_part_has_not_begun(tmp_path):
    (tmp_path / "hostfile").write_text("n1\nn2\n")
    argv = [PYTHON, "-IB", str(PACKAGE / "supervisor"), "each-host", "bash", "-c"]
    argv += ["[[ $0 == 0 ]] || exit 127", "%n"]
    environ = {**os.environ, "LLMCTL_HOSTFILE": f"{tmp_path}/hostfile", "LLMCTL_ATTEMPT_DIR": str(tmp_path)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (127, "llmctl: the part on n2 ended with exit code 127\n")
    assert [*find_unstarted((NodeStart("n1"), silent("n2")), done.stderr).nodes] == ["n2"]
