"""End of an attempt: which nodes are listed, and which are not."""

import json
from pathlib import Path

import pytest

from llmctl.supervisor.attempt import Attempt
from llmctl.supervisor.bad_nodes.ledger import Row, append_rows, read_rows
from llmctl.supervisor.bad_nodes.record import note_end
from tests.llmctl.supervisor.test_supervisor import run_job, settings
from tests.waiting import HANG_S

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


class Run:
    """A run of two nodes with two ranks each, beside the user's own folder."""

    def __init__(self, root: Path) -> None:
        root.chmod(0o755)
        self.own = root / ".llmctl-own"
        self.own.mkdir(mode=0o700)
        self.folder = root / "r"
        self.folder.mkdir()
        (self.folder / "own").symlink_to("../.llmctl-own")
        self.job = settings(self.folder, nodes=2, ranks_per_node=2, is_training=True)

    def attempt(self, number: int = 1) -> Path:
        folder = self.folder / f"attempts/{number}"
        (folder / "errors").mkdir(parents=True, exist_ok=True)
        (folder / "hostfile").write_text("n1 slots=2\nn2 slots=2\n")
        return folder

    def fails(self, rank: int, number: int = 1, **values: object) -> None:
        record = {"rank": rank, "time": 1.0, "consequence": False, "message": "", "exit_code": 1, **values}
        (self.attempt(number) / f"errors/rank-{rank:05d}.json").write_text(json.dumps(record))

    def end(self, number: int = 1, lost: str = "", **failure: object) -> None:
        note_end(self.job, Attempt(number, str(self.attempt(number))), failure, lost)

    @property
    def listed(self) -> dict[str, tuple[str, str]]:
        values = [json.loads(path.read_text()) for path in sorted((self.own / "nodes").glob("*.json"))]
        return {one["node"]: (one["class"], one["cause"]) for one in values}

    @property
    def ends(self) -> list[tuple[str, int, str]]:
        return [(row.node, row.attempt, row.end) for row in read_rows(str(self.own / "nodes"))]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.mark.parametrize("culprits", [["n2"], ["n2.site.example"], ["n1", "n2"]])
def test_all_culprits_of_the_preflight_are_listed(run, culprits):
    run.fails(0, message="preflight: node n2 is slow", culprits=culprits)
    finding = {"culprits": [culprits[-1]], "sentence": "node n2: product speed: 0.4 of the median"}
    (run.attempt() / "preflight.json").write_text(json.dumps({"findings": [finding]}))
    run.end(**{"class": "node", "culprits": culprits})
    causes = {"n1": ("preflight", "node n2 is slow"), "n2": ("preflight", finding["sentence"])}
    assert run.listed == {name.split(".")[0]: causes[name.split(".")[0]] for name in culprits}
    assert run.ends == [("n1", 1, "ok"), ("n2", 1, "ok")]


def test_a_node_that_could_not_start_the_program_is_listed(run):
    cause = "could not start /v/python: Permission denied"
    run.end(**{"class": "node", "culprits": ["n2"], "unstarted": {"n2": cause}})
    assert run.listed == {"n2": ("start", cause)}


def test_a_node_with_an_uncorrectable_fault_of_a_gpu_is_listed(run):
    run.fails(3, type="RuntimeError", message=ECC)
    run.end(**{"class": "node"})
    assert run.listed == {"n2": ("gpu_hardware", ECC)}


@pytest.mark.parametrize(("logs", "names"), [((1,), ["n2"]), ((0, 1), [])])
def test_the_fault_of_a_gpu_in_an_output_names_the_one_node_that_printed_it(run, logs, names):
    for number in logs:
        (run.attempt() / f"node-{number:05d}.log").write_text(f"step 1\n{ECC}\n")
    run.end(**{"class": "node", "output": {"kind": "gpu_hardware", "line": ECC}})
    assert list(run.listed) == names


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("killed", ""),
        ("lost_peer", ""),
        ("unknown", ""),
        ("error", "KeyError: 3"),
        ("out_of_memory", "CUDA out of memory"),
        ("disk", "No space left on device"),
        ("config", ""),
        ("node", "NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=python"),
        ("node", ""),
    ],
)
def test_no_other_failure_lists_a_node(run, failure, message):
    run.fails(2, message=message)
    run.end(**{"class": failure})
    assert run.listed == {}
    first = failure in ("killed", "lost_peer", "unknown")
    assert run.ends == [("n1", 1, "ok"), ("n2", 1, "first" if first else "ok")]


def test_a_machine_that_falls_silent_twice_in_a_run_is_listed(run):
    lost = "node 1 (n2) has sent no heartbeat for 25 s"
    run.end(1, lost, **{"class": "node"})
    run.end(2)
    assert run.listed == {}
    run.end(3, lost, **{"class": "node"})
    assert run.listed == {"n2": ("silent", "fell silent in attempts 1 and 3")}
    assert [end for end in run.ends if end[0] == "n2"] == [("n2", 1, "silent"), ("n2", 2, "ok"), ("n2", 3, "silent")]


def test_the_first_part_to_fail_is_that_of_the_node(run):
    for number, (code, when) in enumerate([(143, 1.0), (137, 2.0)]):
        end = {"code": code, "signal": 9, "time": when, "host": "h"}
        (run.attempt() / f"ended-node-{number:05d}.json").write_text(json.dumps(end))
    run.end(**{"class": "killed"})
    assert run.ends == [("n1", 1, "ok"), ("n2", 1, "first")]


def test_a_node_that_fails_far_too_often_is_listed(run):
    run.end()
    rows = [Row("n1", f"a{number}", 1, "ok") for number in range(200)]
    rows += [Row("n2", f"a{number}", 1, "first" if number < 6 else "ok") for number in range(20)]
    append_rows(str(run.own / "nodes"), rows)
    run.fails(2, number=2)
    run.end(2, **{"class": "killed"})
    assert run.listed == {"n2": ("unclear", "first to fail in 7 of its 21 runs; other nodes in 0.5 % of theirs")}


def test_the_ledger_is_bounded_and_skips_damaged_lines(run):
    run.end()
    ledger = run.own / "nodes/ledger.jsonl"
    with ledger.open("a") as file:
        file.write('{"node": "n3"\n[]\n{"node": "n;3", "run": "r", "attempt": 1, "end": "ok"}\n')
        file.write("x" * (1 << 22) + "\n")
    run.end(2)
    run.end(3)
    assert len(run.ends) == 6
    assert ledger.stat().st_size < 1000
    assert sorted(path.name for path in ledger.parent.iterdir()) == ["ledger.1.jsonl", "ledger.jsonl"]


@pytest.mark.parametrize("name", ["nodes", "nodes/ledger.jsonl"])
def test_what_others_may_write_is_not_used(run, name, capsys):
    run.end()
    (run.own / name).chmod(0o777)
    run.end(2, **{"class": "node", "culprits": ["n2"]})
    assert run.listed == {}
    assert "the list of bad nodes cannot be kept: " in capsys.readouterr().err


def test_one_machine_of_several_leaves_the_list_to_the_head(run):
    note_end(run.job, Attempt(1, str(run.attempt()), "-00001"), {"class": "node", "culprits": ["n2"]})
    assert not (run.own / "nodes").exists()


def test_a_job_whose_preflight_fails_lists_the_node(run):
    """The supervisor of a real job; a fake in the place of the trainer fails as a preflight does."""
    record = {"type": "NodeError", "message": "preflight: n2 is slow", "consequence": False, "exit_code": 1}
    text = json.dumps({**record, "time": 1.0, "rank": 0, "culprits": ["n2"]})
    script = (
        "mkdir -p $LLMCTL_ATTEMPT_DIR/errors; printf 'n1\\nn2\\n' >$LLMCTL_ATTEMPT_DIR/hostfile\n"
        f"echo '{text}' >$LLMCTL_ATTEMPT_DIR/errors/rank-00000.json; exit 1\n"
    )
    job = run_job(run.folder, script, nodes=2, is_training=True)
    _, said = job.communicate(timeout=HANG_S)
    assert job.returncode == 1
    assert run.listed == {"n2": ("preflight", "n2 is slow")}
    assert "n2 is listed as a bad node" in said
    assert [path.name for path in run.own.iterdir()] == ["nodes"]
