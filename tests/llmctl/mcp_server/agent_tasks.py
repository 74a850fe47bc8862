"""The tasks of a scripted agent, by any client that asks for documents by tool and arguments."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from llmctl.runs.view import RunView
from tests.llmctl.api.test_submit import CONFIG

Ask = Callable[..., Awaitable[Any]]
"""Asks a tool by its name and arguments; returns its document, or that of its error."""

_SECOND = "test $LLMCTL_ATTEMPT = 2 && test -z $PYDANTIC_DISABLE_PLUGINS"
"""Succeeds in the second attempt, without the variable that llmctl sets for itself alone."""


async def read_about_runs(ask: Ask, trained: list[RunView]) -> None:
    """Find the failed run and its cause, read numbers, compare the runs ``first`` and ``second``."""
    (found,) = (await ask("runs", state="failed", most=1))["runs"]
    assert found["name"] == "bad" and "ValueError: no such shard" in found["detail"] and found["exit_code"] == 1
    lines = (await ask("logs", run=found["run_id"], rank="failed"))["lines"]
    assert any("ValueError: no such shard" in line for line in lines)
    columns = (await ask("metrics", run="first", points=2))["columns"]
    assert columns["iteration"][-1] == 6 and len(columns["iteration"]) == 2
    assert columns["lm_loss"][-1] == pytest.approx(trained[0].loss)
    both = (await ask("status", runs=["first", "second"]))["runs"]
    assert [run["loss"] for run in both] == [view.loss for view in trained]


async def check_beforehand(ask: Ask, home: Path) -> None:
    """Look at clusters, predict memory, look up keys, check configs and a submission."""
    clusters = {each["name"]: each["scheduler"] for each in (await ask("clusters"))["clusters"]}
    assert clusters["local"] == "local" and clusters["slurm"] == "slurm"
    assert (await ask("clusters", name="slurm"))["scheduler"] == "slurm"
    text = json.dumps(CONFIG)
    small = await ask("plan", config_text=text, device="H100", gpus_per_node=1, set={"model.vocab_size": 1000})
    assert small["fits"] and small["peak_memory_bytes"] > 0
    asked = {"config_text": text, "device": "V100-16GB", "gpus_per_node": 1}
    large_model = {"model.vocab_size": 1000, "model.num_layers": 200, "model.hidden_size": 1024}
    large = await ask("plan", **asked, set=large_model)
    assert not large["fits"] and "its largest item is" in large["why_not"]
    words = (await ask("explain", words=["optimizer.lr", "--swiglu"]))["explained"]
    assert "Learning rate" in words["optimizer.lr"] and "sets model.swiglu" in words["--swiglu"]
    optimizer = await ask("schema", name="config", section="optimizer")
    assert "lr" in optimizer["schema"]["properties"]
    wrong = await ask("dry_run", config_text="model: {num_layer: 2}")
    assert "num_layers" in wrong["error"] and wrong["exit_code"] == 3
    plan = await ask("dry_run", example=True, nodes=2)
    assert plan["run_dir"].startswith(str(home / "runs")) and plan["cost"] is None and "#!" in plan["script"]
    assert plan["messages"]


async def submit_and_end(ask: Ask) -> None:
    """Submit, wait for a failure, resume; and cancel another run."""
    run = (await ask("submit", command=["bash", "-c", _SECOND], name="twice"))["run_id"]
    ended = await ask("wait", run=run, timeout_s=300)
    assert (ended["state"], ended["has_ended"]) == ("failed", True)
    assert "runs its command again" in (await ask("resume", run=run))["messages"][0]
    assert (await ask("wait", run=run, timeout_s=300))["state"] == "completed"
    long = (await ask("submit", command=["sleep", "10000"], name="long"))["run_id"]
    assert (await ask("wait", run=long, timeout_s=0))["has_ended"] is False
    assert (await ask("cancel", run=long, grace_s=5))["run"]["state"] == "cancelled"
