"""Exit code of a job: that of the first rank that failed by its own fault."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.site.job import JobSpec
from tests.llmctl.scripts.script_cases import CASES, RUN_ID, ScriptCase, render_case
from tests.llmctl.scripts.test_run import Stage
from tests.waiting import wait_for
from trainer.process.failure import PeerFailedError, record_failure
from trainer.process.run_directory import RunDirectory

# Stand-in for the Python of a job: as torchrun or as a rank, it copies the error records and then fails.
FAILING_PYTHON = """\
#!/usr/bin/env bash
mkdir -p "$LLMCTL_RUN_DIR/attempts/$LLMCTL_ATTEMPT/errors"
cp {records}/*.json "$LLMCTL_RUN_DIR/attempts/$LLMCTL_ATTEMPT/errors/"
exit {code}
"""


def lose_peers(run: RunDirectory, rank: int) -> None:
    record_failure(run, rank, f"rank {rank}", 5, RuntimeError("gloo"), consequence="lost its peers")


def all_refuse(run: RunDirectory) -> None:
    for rank in range(3):
        record_failure(run, rank, f"rank {rank}", 0, ValueError("data.data_path: is unset"), exit_code=3)


def one_refuses(run: RunDirectory) -> None:
    lose_peers(run, 0)
    # A message may hold any text, even the text that the search looks for.
    record_failure(run, 1, "rank 1", 0, ValueError('"consequence": false, "time": 1, "exit_code": 2}'), exit_code=3)
    lose_peers(run, 2)


def one_breaks_before_one_refuses(run: RunDirectory) -> None:
    record_failure(run, 2, "rank 2", 0, RuntimeError("out of memory"), exit_code=1)
    record_failure(run, 1, "rank 1", 0, ValueError("no such file"), exit_code=3)


def nobody_knows_why(run: RunDirectory) -> None:
    lose_peers(run, 0)
    record_failure(run, 1, "rank 1", 0, PeerFailedError("rank 0 failed"))
    (run.attempt_dir / "errors/rank-00002.json").write_text('{"rank": 2, "consequence": false, "ti')


WHAT = {all_refuse: (1, 3), one_refuses: (137, 3), one_breaks_before_one_refuses: (3, 1), nobody_knows_why: (137, 137)}
"""Error files of the ranks -> (exit code of the launcher, exit code of the job)."""


def code_of_job(case: ScriptCase, launchers_code: int, records: Path, folder: Path) -> tuple[int, int]:
    """Exit code of the job; exit.json must have the same code."""
    folder.mkdir(parents=True)
    python = folder / "failing_python"
    python.write_text(FAILING_PYTHON.format(records=records, code=launchers_code))
    python.chmod(0o755)
    profile = case.profile()
    modules = folder / "modules"
    modules.write_text("module() { :; }\n")
    software = profile.environment.model_copy(update={"module_init": str(modules), "setup": ()})
    # The stand-in for "ip" gives every interface an address.
    rendezvous = profile.rendezvous.model_copy(update={"interface": "eth9"})
    changes = {"runs_root": str(folder / "runs"), "environment": software, "rendezvous": rendezvous}
    profile = profile.model_copy(update=changes)
    is_ssh = profile.scheduler == "ssh"
    job = JobSpec(name="gpt", nodes=1 if is_ssh else 2, launcher=case.launcher)
    rendered = render_case(profile, job, python=str(python))
    run_dir = folder / "runs" / RUN_ID
    code = Stage(folder).run_to_end(rendered, run_dir, ("0",) if is_ssh and case.launcher != "mpirun" else ())
    return int(json.loads((run_dir / "attempts/1/exit.json").read_text())["code"]), code


@pytest.mark.parametrize("what", WHAT, ids=lambda what: what.__name__)
def test_the_first_cause_gives_the_exit_code(tmp_path: Path, what: Callable[[RunDirectory], None]) -> None:
    records = RunDirectory(tmp_path / "recorded")
    what(records)
    launchers_code, expected = WHAT[what]
    seen = {}
    for case in CASES:
        if not case.in_container:
            seen.setdefault((case.profile().scheduler, case.launcher), case)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(
            lambda case: code_of_job(case, launchers_code, records.error(0).parent, tmp_path / str(case)), seen.values()
        )
        codes = dict(zip(map(str, seen.values()), found, strict=True))
    assert codes == dict.fromkeys(codes, (expected, expected))
    assert len(codes) >= 6


@pytest.mark.usefixtures("home")
def test_torchrun_with_an_error_in_the_data(tmp_path: Path) -> None:
    """With the real torchrun, which exits with 1."""
    (tmp_path / "text.jsonl").write_text("{broken\n")
    data = {"streaming": True, "data_path": str(tmp_path / "text.jsonl"), "tokenizer_type": "NullTokenizer"}
    sections = {
        "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "vocab_size": 100},
        "training": {"train_iters": 1, "seq_length": 16, "micro_batch_size": 1},
        "optimizer": {"lr": 1e-3},
        "data": data,
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(sections))
    assert main(["submit", "--cluster", "local", "--nodes", "2", "--run-id", "r", "c.yaml"]) == 0
    ended = tmp_path / "runs/r/attempts/1/exit.json"
    wait_for(ended.exists, str(ended))
    found = json.loads(ended.read_text())
    assert (found["code"], found["reason"], found["node"]) == (3, "failed", socket.gethostname())
    log = (tmp_path / "runs/r/attempts/1/rank-00000.log").read_text()
    assert "text.jsonl:1: is not a line of JSON" in log
