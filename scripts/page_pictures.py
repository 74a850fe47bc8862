"""Pictures of ``llmctl report`` for the documentation: ``make pictures`` takes docs/pictures/report-*.png again.

A real training of the bundled example over two pipeline ranks loses a rank by kill -9, is resumed and completes. Its
page is photographed by Chromium at 400 and 1,600 pixels, light and dark, down to its config. Times and speeds are those
of the machine. ``python scripts/page_pictures.py DIR`` writes to another folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pictures import ROOT, environment, neutral
from playwright.sync_api import sync_playwright

WIDTHS, SCHEMES = (400, 1600), ("light", "dark")
KILLED_AFTER = 33
"""Iteration after which a rank is killed: 13 past a checkpoint."""
_SETTINGS = {
    "training.train_iters": 60,
    "training.global_batch_size": 16,
    "checkpoint.save_interval": 20,
    "parallel.pipeline_model_parallel_size": 2,
}
_LONGEST_S = 600.0


def main(arguments: Sequence[str]) -> int:
    """Train, write the page, and photograph it."""
    target = Path(arguments[0]) if arguments else ROOT / "docs/pictures"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="llmctl-pictures-") as home:
        run_interrupted(Path(home))
        page = Path(home, "report.html")
        llmctl(Path(home), "report", "story", "--output", str(page))
        page.write_text(neutral(page.read_text(encoding="utf-8"), home), encoding="utf-8")
        photograph(page, target)
    return 0


def run_interrupted(home: Path) -> None:
    """A training that fails by the loss of a rank, and completes once it is resumed."""
    settings = [word for key, value in _SETTINGS.items() for word in ("--set", f"{key}={value}")]
    llmctl(home, "submit", "--cluster", "local", "--example", "--nodes", "2", "--name", "story", *settings)
    (run_dir,) = home.glob("llmctl-runs/story-*")
    end = time.monotonic() + _LONGEST_S
    while iteration(run_dir) < KILLED_AFTER:
        if time.monotonic() > end:
            raise SystemExit(f"{run_dir}: did not reach iteration {KILLED_AFTER}")
        time.sleep(0.2)
    beat = json.loads((run_dir / "attempts/1/heartbeat/rank-00001.json").read_text(encoding="utf-8"))
    os.kill(beat["pid"], signal.SIGKILL)
    while not (run_dir / "attempts/1/exit.json").exists():
        if time.monotonic() > end:
            raise SystemExit(f"{run_dir}: the attempt did not end")
        time.sleep(0.2)
    llmctl(home, "resume", "story", "--follow")


def iteration(run_dir: Path) -> int:
    """The newest iteration in a run's metrics."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return max((json.loads(line)["iteration"] for line in lines), default=0)


def llmctl(home: Path, *words: str) -> None:
    """Run one command of llmctl, and end with its output if it fails."""
    command = [sys.executable, "-m", "llmctl", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(home), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def photograph(page: Path, target: Path) -> None:
    """Pictures of a page at both widths, light and dark."""
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width in WIDTHS:
            for scheme in SCHEMES:
                context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
                opened = context.new_page()
                opened.goto(page.as_uri())
                opened.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
                below = opened.locator("#h-config").bounding_box()
                height = below["y"] - 16 if below else 900
                path = target / f"report-{width}-{scheme}.png"
                clip = {"x": 0, "y": 0, "width": width, "height": height}
                opened.screenshot(path=path, full_page=True, clip=clip)
                print(path)
        chromium.close()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
