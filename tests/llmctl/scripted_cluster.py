"""A cluster on this machine, with the scripted stand-in as scheduler."""

from pathlib import Path

from llmctl.runs.index import RunIndex
from tests.llmctl.run_directories import MadeRun, make_run
from tests.standins.scripted_scheduler import ScriptedBackend


class ScriptedCluster:
    """The cluster ``scripted``: its scheduler, its runs, and the user's index of runs."""

    def __init__(self, home: Path, name: str = "scripted") -> None:
        self.name = name
        self.runs_root = home / "runs"
        (home / "scheduler").mkdir(exist_ok=True)
        self.backend = ScriptedBackend(home / "scheduler")
        self.index = RunIndex(home / "state" / "llmctl")
        folder = home / "config" / "llmctl" / "clusters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(f"scheduler: scripted\nruns_root: {self.runs_root}\n")

    def run(self, run_id: str = "demo-1", job_id: str | None = "17", *, age_s: float = 3600.0) -> MadeRun:
        """Make a submitted run."""
        made = make_run(self.runs_root, run_id, cluster=self.name).submit_to_queue(job_id, age_s=age_s)
        self.index.add(made.record)
        return made
