"""A client that has the commands alone, as real processes. Each document is compared with its published schema."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmctl.job_state import JobState
from tests.llmctl.documents import problems_of
from tests.llmctl.mcp_server.served import ROOT
from tests.waiting import HANG_S


@dataclass(frozen=True)
class CommandClient:
    """Gives the documents of the server's tools, by the commands.

    Attributes:
        home: the working directory.
    """

    home: Path

    async def ask(self, tool: str, **arguments: Any) -> Any:
        """The document of a tool; of a command that is refused, its error and exit code."""
        return getattr(self, f"_{tool}")(**arguments)

    def _runs(self, state: str, most: int) -> Any:
        return self._document("list", "list", "--state", state, "--most", str(most))

    def _logs(self, run: str, rank: str) -> Any:
        return {"lines": self._called("logs", run, "--rank", rank).stdout.splitlines()}

    def _metrics(self, run: str, points: int) -> Any:
        """The last rows of metrics.jsonl, which has no command of its own: its folder is in the document of status."""
        (found,) = self._status([run])["runs"]
        rows = [json.loads(line) for line in (Path(found["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
        assert [problem for row in rows for problem in problems_of("metrics", row)] == []
        kept = [row for row in rows if "lm_loss" in row][-points:]
        return {"columns": {key: [row[key] for row in kept] for key in ("iteration", "lm_loss")}}

    def _status(self, runs: list[str]) -> Any:
        return {"runs": [self._document("status", "status", run)["runs"][0] for run in runs]}

    def _clusters(self, name: str | None = None) -> Any:
        if name is not None:
            return self._document("clusters-show", "clusters", "show", name)
        return {"clusters": self._document("clusters-list", "clusters", "list")}

    def _plan(self, config_text: str, device: str, gpus_per_node: int, set: dict[str, Any]) -> Any:
        settings = [word for key, value in set.items() for word in ("--set", f"{key}={value}")]
        words = ("--device", device, "--gpus-per-node", str(gpus_per_node), *settings)
        return self._document("plan", "plan", self._file(config_text), *words)

    def _explain(self, words: list[str]) -> Any:
        return {"explained": {word: self._called("explain", word).stdout for word in words}}

    def _schema(self, name: str, section: str) -> Any:
        return {"schema": json.loads(self._called("schema", name, "--section", section).stdout)}

    def _dry_run(self, config_text: str | None = None, example: bool = False, nodes: int = 1) -> Any:
        what = "--example" if example else self._file(config_text or "")
        return self._document("submit", "submit", what, "--dry-run", "--nodes", str(nodes))

    def _submit(self, command: list[str], name: str) -> Any:
        return self._document("submit", "submit", "--name", name, "--json", "--", *command)

    def _resume(self, run: str) -> Any:
        return self._document("resume", "resume", run)

    def _wait(self, run: str, timeout_s: float) -> Any:
        if timeout_s > 0:
            assert self._called("logs", run, "--follow").returncode in (0, 6)
        (view,) = self._status([run])["runs"]
        return {**view, "has_ended": JobState(view["state"]).is_finished}

    def _cancel(self, run: str, grace_s: float) -> Any:
        assert self._called("cancel", run, "--grace", str(grace_s)).returncode == 0
        return {"run": self._status([run])["runs"][0]}

    def _file(self, config_text: str) -> str:
        (self.home / "asked.yaml").write_text(config_text)
        return "asked.yaml"

    def _document(self, schema: str, *words: str) -> Any:
        done = self._called(*words, *(() if "--json" in words else ("--json",)))
        if not done.stdout:
            return {"error": done.stderr, "exit_code": done.returncode}
        document = json.loads(done.stdout, parse_constant=_refuse)
        assert problems_of(schema, document) == []
        return document if isinstance(document, list) else {**document, "messages": done.stderr.splitlines()}

    def _called(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "llmctl", *words],
            cwd=self.home,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_S,
        )


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not JSON")
