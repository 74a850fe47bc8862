"""The short form of ``make faults`` on this machine, and the judgement of cases."""

import json

import pytest

from tests.faults.__main__ import read
from tests.faults.beds import local
from tests.faults.kinds import BY_NAME, Kind
from tests.faults.page import page, table
from tests.faults.trial import Result, Trial

SHORT = ("segv", "error", "nan-once", "truncated", "double")
"""Quick kinds that no other test has."""


@pytest.fixture(scope="module")
def bed():
    with local() as opened:
        yield opened


@pytest.mark.parametrize("name", SHORT)
def test_a_fault_on_this_machine(bed, name):
    result = Trial(bed, BY_NAME[name], 1).run()
    assert result.is_good, result.line()


class Ended:
    """A bed whose only run has ended; ``losses`` are those of a run without a fault."""

    name = "local"

    def __init__(self, folder, losses):
        self.site, self.folder, self.losses = self, folder, lambda: losses

    def path(self, run_id):
        """Run directory."""
        return self.folder / run_id


def judged(folder, cause, *, kind, losses=(1.5, 1.25), saved=1):
    """Judge a run of three iterations whose first attempt saved ``saved`` and ended with a cause; the second ended."""
    trial = Trial(Ended(folder, {1: 2.0, 2: 1.5, 3: 1.25}), kind, 1)
    trial.host = "n2"
    for number, ending in enumerate([{"class": "killed", "lost_steps": 1, "saved": saved, "trained": 2}, {}], 1):
        (trial.path / f"attempts/{number}").mkdir(parents=True)
        (trial.path / f"attempts/{number}/exit.json").write_text(json.dumps(ending))
    rows = [(1, 1, 2.0), (1, 2, 1.5), *((2, iteration, loss) for iteration, loss in zip((2, 3), losses, strict=True))]
    lines = [json.dumps({"attempt": number, "iteration": at, "lm_loss": loss}) for number, at, loss in rows]
    (trial.path / "metrics.jsonl").write_text("\n".join(lines))
    run = {"state": "completed", "attempts": 2, "detail": "", "costs": {"attempts": [{"cause": cause}]}}
    return trial.judge(run, 1.0)


KIND = Kind("killed-rank", "killed", None, ("killed",), r"rank 1 on {host}", most_lost=1)


def test_a_run_without_an_error_is_good(tmp_path):
    assert judged(tmp_path, "rank 1 on n2 was killed", kind=KIND).is_good


def test_a_wrong_culprit_is_told(tmp_path):
    found = judged(tmp_path, "rank 0 on n1 was killed", kind=KIND)
    assert found.wrong == ("'rank 0 on n1' is named instead of rank 1 on n2",) and not found.is_named
    found = judged(tmp_path / "host", "torchrun on n1 was killed; rank 1 on n2 ended", kind=KIND)
    assert found.wrong == ("'torchrun on n1' is named instead of rank 1 on n2",)


def test_other_losses_are_told(tmp_path):
    assert judged(tmp_path, "rank 1 on n2", kind=KIND, losses=(1.5, 1.26)).wrong == (
        "the losses differ from iteration 3 on",
    )


def test_steps_beyond_the_checkpoint_are_told(tmp_path):
    found = judged(tmp_path, "rank 1 on n2", kind=KIND, saved=2)
    assert found.wrong == ("attempt 2 began at iteration 2, after the checkpoint of 2",)


def test_the_journal_keeps_results_and_the_page_counts_them(tmp_path):
    good = Result("killed-rank", "local", 1, 2.0, True, True, 5, (), "completed")
    bad = Result("killed-rank", "local", 2, None, False, True, 7, ("others",), "failed")
    (tmp_path / "journal").write_text(f"{good.line()}\n{bad.line()}\n")
    results = read(tmp_path / "journal")
    assert results == [good, bad] and read(tmp_path / "none") == []
    assert table(results, [KIND])[-1] == "| killed | local | 2 | 2.0 | 1 | 2 | 7 | 1 |"
    assert page(results, [KIND], {}).endswith("## Not tried yet\n\n- killed-rank: slurm, sge, ssh, pbs\n")
    text = page(results, [KIND], {"slurm": "needs root", "local": ""})
    assert "2 cases: 2 recovered, 1 named rightly, 1 wrong." in text and "No cases on slurm: needs root." in text
    assert "- killed-rank on local, case 2: others; failed" in text
