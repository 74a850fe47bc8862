"""``llmctl data prepare`` on two nodes of a real cluster, beside one process on this machine."""

import json
from pathlib import Path

from tests.schedulers.slurm_site import Site
from tests.waiting import HANG_S
from trainer.data.commands.preprocess import main as preprocess

DOCUMENTS = 9000
BROKEN_LINE = DOCUMENTS - 9
"""A line in the second of two parts, which the second node prepares."""
_NUMBERS = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--append-eod", "--workers", "1")


def check_preparation(site: Site, cluster: str) -> None:
    """Two jobs at once: one makes the bytes of this machine, one has a broken line."""
    lines = [json.dumps({"text": f"{number % 1000} " * (1 + number % 97)}) + "\n" for number in range(DOCUMENTS)]
    submissions = []
    for name in ("whole", "broken"):
        (site.home / f"{name}.jsonl").write_text("".join(lines))
        lines[BROKEN_LINE - 1] = "{broken\n"
        by_nodes = ("--output", f"by-nodes/{name}", "--name", name, "--cluster", cluster, "--nodes", "2")
        submissions.append(site.start("data", "prepare", f"{name}.jsonl", *_NUMBERS, *by_nodes))
    whole, here = str(site.home / "whole.jsonl"), str(site.home / "here/whole")
    assert preprocess(["--input", whole, "--output-prefix", here, *_NUMBERS]) == 0
    for submission in submissions:
        said_to_user, _ = submission.communicate(timeout=HANG_S)
        assert submission.returncode == 0, said_to_user
    run = site.ended("whole")
    assert (run["state"], run["exit_code"], len(set(run["hosts"]))) == ("completed", 0, 2), logs_of(site, run["run_id"])
    made = files(site.home / "here")
    assert files(site.home / "by-nodes", "whole") == made
    assert sorted(made) == [f"whole_text_document.{kind}" for kind in ("bin", "idx", "json")]
    run = site.ended("broken")
    assert (run["state"], run["exit_code"]) == ("failed", 3), (run, logs_of(site, run["run_id"]))
    shown = site.llmctl("logs", "broken")
    assert f"broken.jsonl:{BROKEN_LINE}: is not a line of JSON" in shown, shown
    assert "Traceback" not in logs_of(site, run["run_id"])
    assert not files(site.home / "by-nodes", "broken_")


def files(folder: Path, prefix: str = "") -> dict[str, bytes]:
    """Contents of the files of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.glob(f"{prefix}*") if path.is_file()}


def logs_of(site: Site, run_id: str) -> str:
    """Logs of the nodes and of job.sh."""
    logs = sorted((site.path(run_id) / "attempts/1").glob("node-*.log"))
    return "\n".join([*(f"{log.name}: {log.read_text(errors='replace')}" for log in logs), site.job_log(run_id)])
