"""The live screen over the user's own runs: a real training to its end, and the choice of runs."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.context import Context
from llmctl.errors import RecordError, SchedulerError, UsageError
from llmctl.transport.ssh.terminal import Terminal
from llmctl.watch.clusters import ClusterRuns, connect_first
from tests.llmctl.login_node import write_cluster
from tests.llmctl.operate.report.made_runs import add, made_run, trained
from tests.llmctl.watch.screens import app_of, until


def context_of(home: Path) -> Context:
    """A call of llmctl by the user of these folders."""
    environment = {"XDG_STATE_HOME": str(home / "state"), "XDG_CONFIG_HOME": str(home / "config")}
    return Context.of((), (), {**environment, "LLMCTL_RUNS_ROOT": str(home / "runs")}, home)


def test_a_real_training_is_watched_to_its_end(home, capsys):
    sizes = ("model.num_layers=1", "training.train_iters=30", "training.eval_interval=10", "training.eval_iters=1")
    settings = [word for size in (*sizes, "training.kernel_backend=reference") for word in ("--set", size)]
    assert main(["submit", "--example", "--name", "first", *settings]) == 0
    run_id = capsys.readouterr().out.split()[0]
    source = ClusterRuns(context_of(home))

    async def act() -> None:
        app = app_of(source)
        async with app.run_test(size=(100, 40)) as pilot:
            await until(pilot, run_id)
            await pilot.press("enter")
            screen = await until(pilot, f"{run_id}  completed  on local", "30/30", "validation", "•")
            assert "gradient norm" in screen
            await pilot.press("2")
            await until(pilot, "no heartbeat")
            await pilot.press("4")
            await until(pilot, "attempt 1", "completed")
            await pilot.press("5")
            await until(pilot, "5 log: rank 0", "30/30  loss")
            await pilot.press("escape")
            await until(pilot, "1 run: 1 completed")

    asyncio.run(act())
    assert main(["status", run_id]) == 0
    assert "completed" in capsys.readouterr().out


@pytest.fixture
def runs(home: Path) -> list[str]:
    """Twelve runs that completed."""
    context = context_of(home)
    ids = [f"demo-261127-1200{number:02d}-abcd" for number in range(12)]
    for number, run_id in enumerate(ids):
        made = trained(made_run(home / "runs", run_id, created=1000.0 + number))
        add(context, made)
        context.index.update_state(run_id, "completed", 2000.0)
    return ids


def test_runs_that_ended_long_ago_are_hidden_until_asked_for(home, runs):
    source = ClusterRuns(context_of(home))
    listing = source.list_runs(every=False)
    assert list(listing.runs) == runs[:1:-1]
    assert listing.hidden == 2
    assert list(source.list_runs(every=True).runs) == runs[::-1]
    assert set(listing.runs.values()) == {"local"}


def test_a_named_run_is_opened_at_once_and_an_unknown_one_refused(home, runs):
    source = ClusterRuns(context_of(home), [runs[3]])
    assert source.only_run == runs[3]
    assert list(source.list_runs(every=False).runs) == [runs[3]]
    with pytest.raises(RecordError, match="no run is called 'nothing'"):
        ClusterRuns(context_of(home), ["nothing"])
    with pytest.raises(UsageError, match="abc13"):
        ClusterRuns(context_of(home), cluster="abc13")

    async def act() -> None:
        app = app_of(source, source.only_run)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, f"{runs[3]}  completed  on local", "40/100")
            await pilot.press("escape")
            await until(pilot, "1 run: 1 completed")

    asyncio.run(act())


class Machine:
    """A machine behind ssh, which may be out of reach."""

    is_remote, host, is_closed = True, "login1", False

    def __init__(self, problem: SchedulerError | None = None) -> None:
        self.problem = problem

    def now(self) -> float:
        if self.problem is not None:
            raise self.problem
        return 1.0

    def close(self) -> None:
        self.is_closed = True


def test_passwords_are_asked_for_before_the_screen_only(home, monkeypatch):
    """A question below the screen would take its keys."""
    near, away = Machine(), Machine(SchedulerError("login1: timed out", transient=True))
    told: list[str] = []
    context = replace(context_of(home), tell=told.append)
    for name, machine in (("near", near), ("away", away)):
        write_cluster(home, name, login={"host": f"{name}1"})
        context.connections[name] = machine  # type: ignore[assignment]
    of_screen = connect_first(context, ["near", "away", "local", "gone", "near"])
    assert told == ["connecting to near", "connecting to away"]
    assert (near.is_closed, away.is_closed) == (False, True)
    assert of_screen.connections == {"near": near}
    opened: dict[str, bool] = {}

    def connect(host: str, *_: object, terminal: Terminal, **__: object) -> Machine:
        opened[host] = terminal.is_there or terminal.path == Terminal().path
        return Machine()

    monkeypatch.setattr("llmctl.transport.ssh.connect", connect)
    of_screen.connect(of_screen.profile("away"))
    assert opened == {"away1": False}
    del context.connections["away"]
    context.connect(context.profile("away"))
    assert opened == {"away1": True}
