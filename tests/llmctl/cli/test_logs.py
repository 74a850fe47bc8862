"""``llmctl logs`` as users type the command."""

import json
import pickle

import pytest

from llmctl.cli.main import main
from llmctl.runs.index import RunIndex
from llmctl.transport.processes import identify
from tests.llmctl.run_directories import fail, leave, make_run, recycled


@pytest.fixture
def run(own_folders):
    """A run with two ended attempts of four ranks."""
    made = make_run(own_folders / "runs", "demo-1").submit(recycled(identify(1)))
    for number in (1, 2):
        attempt = made.start_attempt(number)
        for rank in range(4):
            (attempt / f"rank-{rank:05d}.log").write_text(
                "".join(f"attempt {number} rank {rank} line {n}\n" for n in range(1, 31))
            )
        (attempt / "node-00000.log").write_text(f"agent of attempt {number}\n")
        leave(attempt, "failed", 1)
    fail(attempt, 0, "Connection closed by peer", age_s=9)
    fail(attempt, 2, "loss is NaN", age_s=5, kind="ValueError", host="node7")
    (made.path / "job.log").write_text("from job.sh\n")
    RunIndex(own_folders / "state" / "llmctl").add(made.record)
    return made


def shown(capsys, *arguments, code=0):
    assert main(["logs", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err


@pytest.mark.usefixtures("run")
def test_rank_0_of_the_last_attempt(capsys):
    lines, _ = shown(capsys, "demo")
    assert lines == [f"attempt 2 rank 0 line {n}" for n in range(1, 31)]
    assert shown(capsys, "demo", "-n", "2")[0] == ["attempt 2 rank 0 line 29", "attempt 2 rank 0 line 30"]
    assert shown(capsys, "demo", "-n", "1", "--attempt", "1")[0] == ["attempt 1 rank 0 line 30"]


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("ranks", ["0-99999999", "\u00b2", "x", "1-"])
def test_invalid_ranks(capsys, ranks):
    assert "--rank" in shown(capsys, "demo", "--rank", ranks, code=2)[1]


@pytest.mark.usefixtures("run")
def test_several_ranks(capsys):
    expected = ["[rank 3] attempt 2 rank 3 line 30", "[rank 1] attempt 2 rank 1 line 30"]
    assert shown(capsys, "demo", "-n", "1", "--rank", "3,1")[0] == expected
    assert len(shown(capsys, "demo", "-n", "1", "--rank", "all")[0]) == 4
    assert len(shown(capsys, "demo", "-n", "1", "--rank", "1-3")[0]) == 3


@pytest.mark.usefixtures("run")
def test_failed_ranks_come_with_the_cause_first(capsys):
    lines, err = shown(capsys, "demo", "-n", "1", "--rank", "failed")
    assert lines == ["[rank 2] attempt 2 rank 2 line 30", "[rank 0] attempt 2 rank 0 line 30"]
    assert err.splitlines() == [
        "first: rank 2 (pp 0, dp 2, tp 0) on node7: ValueError: loss is NaN",
        "then: rank 0 (pp 0, dp 0, tp 0) on n1: RuntimeError: Connection closed by peer",
    ]
    lines, err = shown(capsys, "demo", "--rank", "failed", "--attempt", "1")
    assert lines == ["[job] from job.sh", "[node 0] agent of attempt 1"]
    assert "no rank wrote an error report in attempt 1" in err


def test_failed_ranks_come_with_those_that_torchs_flight_records_name(run, capsys):
    config = {"1": {"name": "1", "desc": "TENSOR_GROUP", "ranks": "[0, 1, 2]"}}
    waits = {"process_group": ("1", ""), "collective_seq_id": 9, "p2p_seq_id": 0, "profiling_name": "nccl:all_reduce"}
    waits |= {"state": "started", "is_p2p": False}
    folder = run.path / "attempts" / "2" / "flight"
    folder.mkdir()
    for rank, entries in enumerate(([waits], [], [waits])):
        (folder / f"rank_{rank}").write_bytes(pickle.dumps({"pg_config": config, "entries": entries}))
    (folder / "rank_3").write_bytes(b"half a rec")
    _, err = shown(capsys, "demo", "-n", "1", "--rank", "failed")
    words = "rank 1 holds the others up: it has not entered all_reduce 9 of group TENSOR_GROUP; ranks 0, 2 wait for it"
    assert words in err


@pytest.mark.usefixtures("run")
def test_job(capsys):
    lines, _ = shown(capsys, "demo", "--job")
    assert lines == ["[job] from job.sh", "[node 0] agent of attempt 2"]


@pytest.mark.usefixtures("run")
def test_a_missing_rank_or_attempt_is_refused_with_the_valid_ones(capsys):
    assert "there are ranks 0-3" in shown(capsys, "demo", "--rank", "2,9", code=5)[1]
    assert "there are attempts 1-2" in shown(capsys, "demo", "--attempt", "7", code=5)[1]
    assert "give a rank" in shown(capsys, "demo", "--rank", "x", code=2)[1]
    assert "leave out --rank" in shown(capsys, "demo", "--rank", "1", "--job", code=2)[1]
    assert "demo-1" in shown(capsys, "nothing", code=5)[1]
    assert "attempt 1 has ended" in shown(capsys, "demo", "-f", "--attempt", "1", code=2)[1]


def test_download_copies_whole_files_unchanged(run, tmp_path, capsys):
    raw = bytes(range(256)) * 9000
    (run.path / "attempts" / "2" / "rank-00001.log").write_bytes(raw)
    assert shown(capsys, "demo", "--rank", "0,1", "--download", "copies")[0] == [f"2 files in {tmp_path / 'copies'}"]
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["rank-00000.log", "rank-00001.log"]
    assert (tmp_path / "copies" / "rank-00001.log").read_bytes() == raw
    (tmp_path / "file").write_text("")
    assert "--download" in shown(capsys, "demo", "--download", "file/x", code=2)[1]


def test_control_characters_do_not_reach_the_terminal(run, capsys):
    log = run.path / "attempts" / "2" / "rank-00000.log"
    log.write_bytes(b"\x1b]0;owned\x07\x1b[2J" + bytes(range(0, 9)) + b"\xff" * 10 + b"x" * 100_000 + b"\nend")
    lines, _ = shown(capsys, "demo")
    assert len(lines) == 2
    assert lines[1] == "end"
    assert "\x1b" not in lines[0]
    assert len(lines[0]) < 20_000


def test_a_run_without_an_attempt_shows_the_output_of_job_sh(own_folders, capsys):
    made = make_run(own_folders / "runs", "new-1").submit(None)
    RunIndex(own_folders / "state" / "llmctl").add(made.record)
    assert "no output yet" in shown(capsys, "new")[1]
    (made.path / "job.log").write_text("cannot load the module\n")
    assert shown(capsys, "new")[0] == ["cannot load the module"]
    assert "no attempt has started yet" in shown(capsys, "new", "--attempt", "1", code=5)[1]


def test_the_traceback_of_the_first_failed_rank_is_added_if_its_log_lacks_it(run, capsys):
    path = run.path / "attempts/2/errors/rank-00002.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "traceback": "Traceback:\n  at line 7\nValueError: loss is NaN\n"}))
    lines, _ = shown(capsys, "demo", "-n", "1", "--rank", "failed")
    assert lines[:3] == ["[rank 2] Traceback:", "[rank 2]   at line 7", "[rank 2] ValueError: loss is NaN"]
    with (run.path / "attempts/2/rank-00002.log").open("a") as file:
        file.write("ValueError: loss is NaN\n")
    lines, _ = shown(capsys, "demo", "-n", "1", "--rank", "failed")
    assert lines == ["[rank 2] ValueError: loss is NaN", "[rank 0] attempt 2 rank 0 line 30"]


def test_an_error_of_the_trainers_own_is_a_sentence_without_class_or_traceback(run, capsys):
    path = run.path / "attempts/2/errors/rank-00002.json"
    values = json.loads(path.read_text())
    trace = "Traceback:\n  at line 7\ntrainer.data.errors.DataError: /w/d: is cut\nwrite it again\n"
    own = {"type": "DataError", "module": "trainer.data.errors", "message": "/w/d: is cut\nwrite it again"}
    path.write_text(json.dumps({**values, **own, "traceback": trace}))
    lines, err = shown(capsys, "demo", "-n", "1", "--rank", "failed")
    assert "first: rank 2 (pp 0, dp 2, tp 0) on node7: /w/d: is cut; write it again" in err.splitlines()
    assert "DataError" not in "".join(lines) + err


TRACE = ["Traceback (most recent call last):", '  File "x.py", line 6, in <module>', "    f()", "ValueError: odd"]


@pytest.fixture
def command(own_folders):
    """A COMMAND that has failed without a word."""
    made = make_run(own_folders / "runs", "cmd-1", train_iters=None).submit(recycled(identify(1)))
    leave(made.start_attempt(), "failed", 1)
    RunIndex(own_folders / "state" / "llmctl").add(made.record)
    return made


def test_all_ranks_of_a_command_are_its_output(command, capsys):
    assert shown(capsys, "cmd-1", "--rank", "all")[1] == "cmd-1: ended without output: failed: ended with exit code 1\n"
    (command.path / "attempts/1/node-00000.log").write_text("out\n")
    assert shown(capsys, "cmd-1", "--rank", "all")[0] == ["out"]
    said = shown(capsys, "cmd-1", "--rank", "0", code=2)[1]
    assert "--rank: the output of a COMMAND is not divided by ranks; llmctl logs cmd-1 has it" in said


def test_a_failed_command_shows_its_traceback_or_last_lines(command, capsys):
    log = command.path / "attempts/1/node-00000.log"
    log.write_text("".join(f"line {number}\n" for number in range(50)))
    lines, err = shown(capsys, "cmd-1", "--rank", "failed")
    assert lines == [f"line {number}" for number in range(30, 50)]
    assert "no rank wrote an error report in attempt 1; this is from the output of the job:" in err
    log.write_text("\n".join([*TRACE, *(f"clean-up {number}" for number in range(50))]))
    assert shown(capsys, "cmd-1", "--rank", "failed")[0] == TRACE


def test_a_pending_run_shows_reason_and_waiting_time(cluster, capsys):
    cluster.run(age_s=300)
    cluster.backend.says("queue", "17|PENDING|job-demo-1|nodes are busy")
    lines, err = shown(capsys, "demo-1")
    assert lines == []
    assert err == "demo-1: no output yet; pending for 5 min: nodes are busy\n"
