"""Trackers that raise, hang or are slow: the run goes on, and it is told once."""

import threading

import pytest

from tests.waiting import HANG_S, wait_for
from trainer.config.errors import ConfigError
from trainer.config.sections.logging import LoggingConfig
from trainer.planning.build_config import build_config
from trainer.process.heartbeat import Heartbeat
from trainer.trackers import tracking as module
from trainer.trackers.choice import chosen_trackers
from trainer.trackers.protocol import RunFacts
from trainer.trackers.tracking import Tracking, has_hanging_tracker

FACTS = RunFacts("run-1", "name")


class Recorder:
    """A tracker of a user's own."""

    made = []

    def __init__(self):
        self.calls = []
        self.made.append(self)

    def begin(self, facts):
        self.calls.append(("begin", facts.run_id))

    def log(self, iteration, scalars):
        self.calls.append((iteration, scalars))

    def end(self, outcome):
        self.calls.append(("end", outcome))


class Raising(Recorder):
    def log(self, iteration, scalars):
        super().log(iteration, scalars)
        raise OSError("the server is gone\nmore lines")


class Unable(Recorder):
    def begin(self, facts):
        raise SystemExit(f"no server for {facts.run_id}")


class Hanging(Recorder):
    go_on = threading.Event()

    def log(self, iteration, scalars):
        super().log(iteration, scalars)
        self.go_on.wait(HANG_S)


not_a_function = 1


def log_of(path):
    """A function that needs an argument, which nobody gives."""


@pytest.fixture(autouse=True)
def _fresh():
    Recorder.made.clear()
    Hanging.go_on.clear()
    yield
    Hanging.go_on.set()


def track(*classes, rows=(), interval=1, outcome="completed"):
    """Hand rows to one tracker of each class; the heartbeat."""
    heartbeat = Heartbeat(None, 0)
    with Tracking(heartbeat) as tracking:
        names = [f"{__name__}:{each.__name__}" for each in classes]
        tracking.choose(LoggingConfig(trackers=names, tensorboard_log_interval=interval))
        tracking.begin(FACTS)
        for row in rows:
            tracking.log(row, row["iteration"] * 8, 8)
        tracking.outcome = outcome
    return heartbeat


def training(iteration):
    return {"iteration": iteration, "lm_loss": float(iteration)}


def test_all_calls_come_in_order_and_all_rows_of_an_iteration():
    rows = [training(1), training(2), {"iteration": 2, "valid_loss": 0.5}, training(3)]
    track(Recorder, rows=rows, interval=2, outcome="stopped")
    (tracker,) = Recorder.made
    first = {"lm loss": 2.0, "samples vs steps": 16.0, "batch-size": 8.0}
    second = {"lm loss validation": 0.5, "samples vs steps": 16.0}
    assert tracker.calls == [("begin", "run-1"), (2, first), (2, second), ("end", "stopped")]


def test_a_tracker_that_raises_is_told_once_and_gets_all_later_rows(capfd):
    heartbeat = track(Raising, Recorder, rows=[training(1), training(2)])
    raising, other = Recorder.made
    assert [call[0] for call in raising.calls] == ["begin", 1, 2, "end"] == [call[0] for call in other.calls]
    said = capfd.readouterr().out
    warning = (
        f"logging.trackers: {__name__}:Raising failed at iteration 1: OSError: the server is gone; "
        "the run goes on, and metrics.jsonl has all numbers"
    )
    assert said == f"{warning}\nlogging.trackers: {__name__}:Raising lacks 2 rows of metrics.jsonl\n"
    assert heartbeat._warning == warning
    heartbeat.warn("")  # a good checkpoint does not take the warning back
    assert heartbeat._warning == warning


def test_a_tracker_that_cannot_begin_is_told_once(capfd):
    track(Unable, rows=[training(1)] * 3)
    said = capfd.readouterr().out
    assert (
        "could not begin, and gets no numbers of this attempt: SystemExit: no server for run-1; the run goes on" in said
    )
    assert said.count("\n") == 1


def test_a_tracker_that_hangs_loses_rows_and_is_left_behind(monkeypatch, capfd):
    monkeypatch.setattr(module, "_MOST_WAITING", 3)
    monkeypatch.setattr(module, "_LAST_WAIT_S", {"completed": 0.0})
    track(Hanging, rows=[training(n) for n in range(1, 10)])
    first, last = capfd.readouterr().out.splitlines()
    assert "Hanging has 3 rows waiting, and gets no more until it has taken some; the run goes on" in first
    assert "Hanging has not ended within 0 s, and the run ends without it" in last
    assert has_hanging_tracker()
    Hanging.go_on.set()
    wait_for(lambda: not has_hanging_tracker(), "the end of the tracker")


def test_a_tracker_that_is_busy_for_long_is_told(monkeypatch, capfd):
    monkeypatch.setattr(module, "_LONG_CALL_S", -1.0)
    with Tracking(Heartbeat(None, 0)) as tracking:
        tracking.choose(LoggingConfig(trackers=[f"{__name__}:Hanging"]))
        tracking.begin(FACTS)
        tracking.log(training(1), 8, 8)
        wait_for(lambda: Recorder.made and len(Recorder.made[0].calls) == 2, "the first row")
        tracking.log(training(2), 16, 8)
        Hanging.go_on.set()
        tracking.outcome = "completed"
    assert "has been busy with one call for over -1 s; the run goes on" in capfd.readouterr().out


def test_another_form_of_the_name_is_refused_before_the_queue():
    with pytest.raises(ValueError, match="'my_logger' is not MODULE:FUNCTION, such as my_package.my_module:my_func"):
        LoggingConfig(trackers=["my_logger"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:make", "no_such_module cannot be imported (ModuleNotFoundError: No module named"),
        (f"{__name__}:nothing", f"{__name__} has no function nothing; name one that it has"),
        (f"{__name__}:not_a_function", "has no function not_a_function"),
        (f"{__name__}:log_of", "is called as log_of(), but has the parameters (path)"),
    ],
)
def test_a_wrong_function_is_refused_before_training(name, said):
    with pytest.raises(ConfigError) as caught:
        chosen_trackers(LoggingConfig(trackers=[name]))
    assert caught.value.key == "logging.trackers"
    assert said in str(caught.value)


def test_a_missing_package_is_refused_before_training(monkeypatch):
    monkeypatch.setattr("trainer.trackers.choice.find_spec", lambda _: None)
    for keys, said in (
        ({"tensorboard_dir": "x"}, "is not installed; pip install tensorboard, or"),
        (
            {"tensorboard_dir": "x", "wandb_project": "p", "mlflow_tracking_uri": "http://m"},
            "is not installed (logging.wandb_project, logging.mlflow_tracking_uri too); "
            "pip install tensorboard wandb mlflow-skinny, or",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            chosen_trackers(LoggingConfig(**keys))
        assert str(caught.value) == f"logging.tensorboard_dir: needs a package that {said} set null to train without"


def test_an_address_with_a_password_is_refused():
    with pytest.raises(ConfigError) as caught:
        build_config({"logging": {"mlflow_tracking_uri": "https://me:secret@host"}})
    assert caught.value.key == "logging.mlflow_tracking_uri"
    assert "secret" not in str(caught.value).replace("--secret", "")
    assert LoggingConfig(mlflow_tracking_uri="https://me@host:80/a:b@c").mlflow_tracking_uri
