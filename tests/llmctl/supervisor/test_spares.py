"""Choice of the nodes of an attempt, and nodes at fault: as tables, and with real processes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from llmctl.paths import PACKAGE
from llmctl.supervisor.restarts import Failure, RankFailure
from llmctl.supervisor.spares.choice import Choice, choose, silent_nodes
from llmctl.supervisor.spares.faults import FailureFacts, fault_values, first_node, known_as, nodes_at_fault
from tests.llmctl.supervisor.test_supervisor import PYTHON, ending, run_job, settings
from tests.waiting import HANG_S

ALL = ("n1", "n2", "n3", "n4")
OTHER = "does not answer"


@pytest.mark.parametrize(
    ("hosts", "nodes", "left_out", "silent", "expected"),
    [
        (ALL, 3, {}, set(), Choice(("n1", "n2", "n3"), {})),
        (ALL, 3, {"n2": "unfit"}, set(), Choice(("n1", "n3", "n4"), {"n2": "unfit"})),
        (ALL, 3, {}, {"n3"}, Choice(("n1", "n2", "n4"), {"n3": OTHER})),
        # The node that was the cause takes part again when no spare is left.
        (ALL, 3, {"n2": "unfit", "n3": "unfit"}, set(), Choice(("n1", "n2", "n4"), {"n3": "unfit"})),
        (ALL, 3, {"n2": "unfit", "n3": OTHER}, {"n3"}, Choice(("n1", "n2", "n4"), {"n3": OTHER})),
        # The head runs the supervisor.
        (ALL, 3, {"n1": "unfit"}, set(), Choice(("n1", "n2", "n3"), {})),
        (ALL, 1, {"n1": "unfit"}, set(), Choice(("n1",), {})),
        (
            ("n1", "n2", "n3"),
            2,
            {},
            {"n2", "n3"},
            Choice(
                ("n1",),
                {"n2": OTHER, "n3": OTHER},
                "1 of 3 nodes are left for 2 to train on: n2 does not answer, n3 does not answer",
            ),
        ),
    ],
)
def test_the_nodes_of_an_attempt(hosts, nodes, left_out, silent, expected):
    assert choose(hosts, nodes, left_out, silent) == expected


@pytest.mark.parametrize(
    ("facts", "kind", "first", "at_fault"),
    [
        (FailureFacts(ALL, culprits=("n3.lab.org",)), "node", "n3", {"n3": "why"}),
        (FailureFacts(ALL, culprits=("n3", "n4")), "node", "", {"n3": "why", "n4": "why"}),
        (FailureFacts(ALL, culprits=("n1",)), "node", "n1", {}),
        (FailureFacts(ALL, failed="n2"), "killed", "n2", {}),
        (FailureFacts(ALL, failed="n2", before="n2"), "killed", "n2", {"n2": "two failures in a row began there, "}),
        (FailureFacts(ALL, failed="n2", before="n3"), "killed", "n2", {}),
        (FailureFacts(ALL, failed="n1", before="n1"), "killed", "n1", {}),
        (FailureFacts(ALL, failed="n2", before="n2"), "roll_back", "n2", {}),
        (FailureFacts(ALL, failed="n2", before="n2"), "config", "n2", {}),
        (FailureFacts(ALL, hanging=("n2",), before="n2"), "hang", "n2", {"n2": "two failures in a row"}),
        (FailureFacts(ALL, hanging=("n2", "n3"), before="n2"), "hang", "", {}),
        (FailureFacts(ALL, quiet=("n4",)), "lost_peer", "n4", {}),
        (FailureFacts(ALL, quiet=("n4",), unended=("n4",)), "lost_peer", "n4", {"n4": "its part of the run was lost"}),
        (FailureFacts(ALL, unended=("n3", "n4")), "lost_peer", "", {}),
        # The supervisor has killed what was left after an error or a hang.
        (FailureFacts(ALL, failed="n2", unended=("n4",)), "error", "n2", {}),
        (FailureFacts(ALL, hanging=("n2",), unended=("n2",)), "hang", "n2", {}),
    ],
)
def test_the_nodes_at_fault(facts, kind, first, at_fault):
    found = nodes_at_fault(facts, kind, "why")
    assert first_node(facts) == first and found.keys() == at_fault.keys()
    assert all(found[node].startswith(words) for node, words in at_fault.items()), found


@pytest.mark.parametrize(
    ("node", "hosts", "name"),
    [("n2.a", ("n1", "n2"), "n2"), ("n2", ("n1.a", "n2.a"), "n2.a"), ("n2.a", ("n2.b", "n2.c"), "n2.a")],
)
def test_a_node_has_the_schedulers_name(node, hosts, name):
    assert known_as(node, hosts) == name


def rank_error(rank: int, *, consequence: bool = False, when: float = 2.0) -> RankFailure:
    return RankFailure("OSError", "", consequence, 1, when, rank=rank)


def prepared(run_dir: Path, **changes: object):
    """A run with the files of two attempts of one job, three nodes with two ranks each."""
    job = settings(run_dir, nodes=3, ranks_per_node=2, is_training=True, spare_nodes=1, **changes)
    for number in (1, 2):
        folder = run_dir / f"attempts/{number}"
        folder.mkdir(parents=True)
        (folder / "started.json").write_text(json.dumps({"job_id": "7", "attempt": number}))
        (folder / "hostfile").write_text("n1 slots=2\nn2 slots=2\nn3 slots=2\n")
        for node in range(3):
            (folder / f"node-{node:05d}.log").touch()
    return job


def ended(run_dir: Path, node: int, *, code: int = 1, number: int = 0, when: float = 3.0) -> None:
    values = {"code": code, "signal": number, "time": when, "host": "x"}
    (run_dir / f"attempts/2/ended-node-{node:05d}.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("ranks", "parts", "hanging", "expected"),
    [
        ((rank_error(3), rank_error(0, consequence=True)), {0: 0, 1: 0, 2: 0}, (), "n2"),
        ((), {0: 15, 1: 9, 2: 15}, (), "n2"),
        (tuple(rank_error(rank, consequence=True) for rank in range(4)), {0: 0, 1: 0}, (), "n3"),
        ((), {0: 0, 1: 0, 2: 0}, (2, 3), "n2"),
        ((), {0: 0, 1: 0, 2: 0}, (1, 3), ""),
    ],
)
def test_the_node_of_the_first_cause_by_the_files(tmp_path, ranks, parts, hanging, expected):
    job = prepared(tmp_path)
    for node, number in parts.items():
        ended(tmp_path, node, code=128 + number if number else 1, number=number)
    found = fault_values(job, f"{tmp_path}/attempts/2", Failure(1, ranks=ranks), "lost_peer", "why", hanging)
    assert found["first_node"] == expected
    assert found["leaves_out"] == ({"n3": "its part of the run was lost without an end"} if len(parts) < 3 else {})


@pytest.mark.parametrize(("job_id", "at_fault"), [("7", ["n2"]), ("6", [])])
def test_only_failures_of_the_same_job_count(tmp_path, job_id, at_fault):
    job = prepared(tmp_path)
    (tmp_path / "attempts/1/started.json").write_text(json.dumps({"job_id": job_id}))
    (tmp_path / "attempts/1/exit.json").write_text(json.dumps({"first_node": "n2"}))
    for node in range(3):
        ended(tmp_path, node, code=137 if node == 1 else 143, number=9 if node == 1 else 15)
    found = fault_values(job, f"{tmp_path}/attempts/2", Failure(137), "killed", "", ())
    assert [*found["leaves_out"]] == at_fault


def chosen(run_dir: Path, *hosts: str, probe: bool = False, **environ: str) -> "subprocess.CompletedProcess[str]":
    argv = [PYTHON, "-IB", str(PACKAGE / "supervisor"), "choose-nodes", "--job", f"{run_dir}/job.json"]
    environ = {**os.environ, "LLMCTL_ATTEMPT": "2", **environ}
    argv += ["--probe"] * probe
    return subprocess.run([*argv, *hosts], env=environ, capture_output=True, text=True, check=False)


def test_an_attempt_leaves_out_the_nodes_of_all_attempts_before(tmp_path):
    (tmp_path / "job.json").write_text(json.dumps(prepared(tmp_path)._asdict()))
    before = {"job_id": "7", "left_out": {"n3": "unfit"}}
    (tmp_path / "attempts/1/started.json").write_text(json.dumps(before))
    (tmp_path / "attempts/1/exit.json").write_text(json.dumps({"leaves_out": {"n2": "slow"}}))
    done = chosen(tmp_path, "n1", "n2", "n3", "n4", "n5")
    assert (done.returncode, done.stdout.split()) == (0, ["n1", "n4", "n5"])
    assert done.stderr == "llmctl: n2 is left out: slow\nllmctl: n3 is left out: unfit\n"
    started = json.loads((tmp_path / "attempts/2/started.json").read_text())
    assert started == {"job_id": "7", "attempt": 2, "left_out": {"n2": "slow", "n3": "unfit"}, "shortage": ""}
    back = chosen(tmp_path, "n1", "n2", "n3", "n4")
    assert back.stdout.split() == ["n1", "n2", "n4"]
    assert "n2 takes part again, as no spare node is left: slow\n" in back.stderr


SRUN = """#!/bin/sh
for word; do case $word in --nodelist=*) nodes=${word#*=} ;; esac; done
case ,$nodes, in *,dead,*) exit 1 ;; *,stuck,*) exec sleep 1000 ;; esac
echo answers
"""


@pytest.fixture
def srun(tmp_path, monkeypatch):
    """A stand-in of srun for nodes of which some start nothing; returns PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return os.environ["PATH"]


@pytest.mark.parametrize(
    ("hosts", "silent"),
    [((), set()), (("a", "b"), set()), (("a", "dead"), {"dead"}), (("stuck", "a", "dead"), {"stuck", "dead"})],
)
@pytest.mark.usefixtures("srun")
def test_nodes_that_do_not_answer(hosts, silent):
    assert silent_nodes(hosts, 0.5) == silent


@pytest.mark.usefixtures("srun")
def test_nodes_that_do_not_answer_another_starter():
    words = ["sh", "-c", "case $0 in stuck) exec sleep 1000 ;; mute) exit 0 ;; esac; echo answers", "%h"]
    assert silent_nodes(("a", "stuck", "b", "mute"), 0.5, words) == {"stuck", "mute"}


def test_a_shortage_ends_the_launch_with_its_reason(tmp_path, srun):
    (tmp_path / "job.json").write_text(json.dumps(prepared(tmp_path)._asdict()))
    done = chosen(tmp_path, "n1", "dead", "n3", "n4", probe=True, PATH=srun)
    assert (done.returncode, done.stdout.split()) == (0, ["n1", "n3", "n4"])
    (tmp_path / "attempts/1/exit.json").write_text(json.dumps({"leaves_out": {"n3": "slow"}}))
    done = chosen(tmp_path, "n1", "dead", "n3", probe=True, PATH=srun)
    sentence = "2 of 3 nodes are left for 3 to train on: dead does not answer"
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.endswith(f"llmctl: {sentence}\n")
    assert json.loads((tmp_path / "attempts/2/started.json").read_text())["shortage"] == sentence


@pytest.mark.usefixtures("srun")
def test_a_job_with_too_few_nodes_ends_with_the_cause_and_does_not_begin_again(tmp_path):
    words = ("choose-nodes", "--job", f"{tmp_path}/r/job.json", "--probe", "n1", "dead", "n3")
    script = f'"$LLMCTL_PYTHON" -IB {PACKAGE}/supervisor {" ".join(words)} || exit 1\n'
    more = {"nodes": 3, "spare_nodes": 1, "max_restarts": 3, "restart_on": ("node", "error", "unknown")}
    job = run_job(tmp_path / "r", script, **more)
    _, said = job.communicate(timeout=HANG_S)
    sentence = "2 of 3 nodes are left for 3 to train on: dead does not answer"
    end = ending(tmp_path / "r")
    assert (end["class"], end["not_restarted"]) == ("node", sentence), (end, said)
    assert not (tmp_path / "r/attempts/2").exists()
