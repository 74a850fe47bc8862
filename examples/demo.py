"""``make demo``: train a small language model on Python code with two processes.

All files are in ./.demo: the tokenized text, kept while it is intact, and the runs. An unfinished run is resumed, or
followed if it is still running; otherwise a new run starts. ``--new`` always starts a new run. A run without native
kernels does not wait for their build, which goes on in the background.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from trainer.data.indexed.indexed_dataset import IndexedDataset

ROOT = Path(__file__).resolve().parents[1]
CONFIG = Path(__file__).with_name("demo.yaml")
VOCAB_SIZE = 4096
HELD_OUT = 0.05
"""Equal to data.split in demo.yaml: the tokenizer must not see these files either."""
PROMPT = "def read(self, path):\n"
EVALUATED = 50_000
"""Held-out tokens that are evaluated at the end: all of them take longer than the training."""
INTERRUPTED = 130
_AT_WORK = "kernels: "
"""Begins the lines of llmctl env kernels build while it compiles, or waits for another process that compiles."""
_LOOK_S = 0.1
LLMCTL = (sys.executable, "-c", "from llmctl.cli.main import run; run()")
"""Runs the llmctl of this environment, even if another is on PATH."""


@dataclass(frozen=True)
class KernelBuild:
    """The build of the kernels in the background, and the file with its output."""

    process: subprocess.Popen[bytes]
    log: Path

    def settings(self) -> list[str]:
        """The setting of a run that does not wait for the build; none if the kernels are there.

        Waits until the command has found the kernels or has begun to compile.
        """
        while self.process.poll() is None and not self._is_at_work():
            time.sleep(_LOOK_S)
        if not self._is_at_work():
            return []
        print("The native kernels are built in the background; this run trains on torch's operations.")
        return ["training.kernel_backend=torch"]

    def _is_at_work(self) -> bool:
        return any(line.startswith(_AT_WORK) for line in self.log.read_text().splitlines())

    def say(self) -> None:
        """Tell how far the build has come in a run that did not wait for it."""
        if self.process.poll() is None:
            print("The kernels are not complete: llmctl env kernels build goes on where this build ends.")
        elif self.process.returncode:
            print(f"The kernels could not be built: {self.log} says why.")


class Demo:
    """The steps of the demo; each step prints a line.

    Attributes:
        folder: the demo's folder.
        data: prefix of the token files.
        tokenizer: the vocabulary.
        runs: folder of the run directories.
        text: folder of source files to train on; None: the standard library's.
    """

    def __init__(self, folder: Path, text: Path | None = None) -> None:
        self.folder = folder
        self.text = text
        self.data = folder / "data" / "python_text_document"
        self.tokenizer = folder / "data" / "tokenizer.json"
        self.runs = folder / "runs"
        # The demo's runs stay in this checkout; llmctl finds them by its index.
        self._environment = os.environ | {"LLMCTL_RUNS_ROOT": str(self.runs)}

    def run(self, config: Path, new: bool, settings: Sequence[str]) -> int:
        """Prepare, train and report; returns the exit code of the process."""
        with self._kernels_behind() as build:
            self.prepare()
            run_id, code = self._train(config, new, [*settings, *build.settings()])
            if code:
                return code
            build.say()
        state = self._state(run_id)
        if state != "completed":
            print(f"The run is {state}, not completed: `llmctl status {run_id}` says why; make demo resumes it.")
            return 1
        return self.report(run_id)

    def _train(self, config: Path, new: bool, settings: Sequence[str]) -> tuple[str, int]:
        """Start, resume or follow a run; returns its id and llmctl's exit code."""
        run_id = self._last_run()
        state = self._state(run_id) if run_id and not new else "none"
        if run_id is None or state in ("none", "completed"):
            before = f"The last run, {run_id}, is done. " if run_id else ""
            run_id = f"demo-{time.strftime('%y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            _say(f"2. Training. {before}Starting the new run {run_id}.")
            code = self._follow(*self._submission(config, run_id, settings))
        elif state in ("running", "pending"):
            _say(f"2. Training. {run_id} is still {state}: following it. (--new would start another.)")
            code = self._follow("logs", run_id, "-f")
        else:
            _say(f"2. Training. {run_id} is {state}: resuming it. (--new would start another.)")
            code = self._follow("resume", run_id, "--follow")
        return run_id, code

    @contextmanager
    def _kernels_behind(self) -> Iterator[KernelBuild]:
        """Build the kernels in the background, at most until the end of the training."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "kernels.log").open("w+") as log:
            # In a session of its own: Ctrl-C ends the following, and below a signal reaches all processes of the build.
            process = subprocess.Popen(
                ["nice", "-n", "19", *LLMCTL, "env", "kernels", "build", "--cluster", "local"],
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                yield KernelBuild(process, Path(log.name))
            finally:
                # The trainer's command kills its compilers at this signal.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait()

    def prepare(self) -> None:
        """Tokenize the standard library, unless unchanged tokens exist."""
        from examples.python_corpus import standard_library_files
        from examples.train_tokenizer import train_byte_level_bpe
        from trainer.data.commands.preprocess import tokenize_documents
        from trainer.data.tokenizers.factory import open_tokenizer
        from trainer.data.tokenizers.settings import TokenizerSettings

        files = standard_library_files(self.text)
        size = sum(file.path.stat().st_size for file in files)
        source = self.text or f"Python {sys.version.split()[0]}'s library"
        _say(f"1. Text: {len(files)} source files of {source}, {size / 1e6:.1f} MB.")
        fingerprint = hashlib.sha256(f"{VOCAB_SIZE} {HELD_OUT}\n".encode())
        for file in files:
            fingerprint.update(f"{file.name} {hashlib.sha256(file.path.read_bytes()).hexdigest()}\n".encode())
        mark = self.folder / "data" / "prepared.json"
        if _is_intact(mark, fingerprint.hexdigest()):
            print("Using the existing tokens.")
            return
        started = time.monotonic()
        mark.unlink(missing_ok=True)
        seen = files[: round((1 - HELD_OUT) * len(files))]
        train_byte_level_bpe((file.read() for file in seen), VOCAB_SIZE, self.tokenizer)
        tokenizer = open_tokenizer(TokenizerSettings(tokenizer_model=str(self.tokenizer)))
        manifest = tokenize_documents((file.read() for file in files), tokenizer, self.data)
        print(
            f"Trained a vocabulary of {VOCAB_SIZE} and wrote {manifest.tokens:,} tokens to {self.data}.bin, "
            f"in {time.monotonic() - started:.0f} s."
        )
        made = [self.tokenizer, *(self.data.with_name(self.data.name + end) for end in (".bin", ".idx", ".json"))]
        contents = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made}
        mark.write_text(json.dumps({"fingerprint": fingerprint.hexdigest(), "files": contents}, indent=1))

    def report(self, run_id: str) -> int:
        """Print the model's results."""
        run_dir = self.runs / run_id
        losses = _losses(run_dir / "metrics.jsonl")
        _say(f"3. Result, from {run_dir}")
        print(f"training loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last (nats per token)")
        most = ("--max-tokens", str(EVALUATED))
        found = json.loads(self._trainer("evaluate", "--checkpoint", str(run_dir), *most, "--json"))
        unigram = self._unigram_loss(run_dir)
        print(
            f"held-out text: loss {found['loss']:.3f}, perplexity {found['perplexity']:.1f}, "
            f"{found['bits_per_byte']:.2f} bits per byte, over {found['tokens']:,} tokens"
        )
        print(f"a model that knows only the frequency of each token: loss {unigram:.3f} on the same text")
        print("The model continues a prompt:")
        options = ["--max-new-tokens", "40", "--temperature", "0.7", "--top-k", "40", "--seed", "1"]
        print(self._trainer("generate", "--checkpoint", str(run_dir), "--prompt", PROMPT, *options))
        _say("4. llmctl status")
        return self._llmctl("status")

    def _submission(self, config: Path, run_id: str, settings: Sequence[str]) -> list[str]:
        return [
            *("submit", str(config), "--cluster", "local", "--nodes", "2", "--run-id", run_id),
            *("--set", "parallel.tensor_model_parallel_size=2"),
            *("--set", f"data.data_path={self.data}", "--set", f"data.tokenizer_model={self.tokenizer}"),
            *(part for setting in settings for part in ("--set", setting)),
            "--follow",
        ]

    def _last_run(self) -> str | None:
        # Run ids contain their time, so the last name is the newest run.
        found = sorted(path.parent.name for path in self.runs.glob("demo-*/run.json"))
        return found[-1] if found else None

    def _state(self, run_id: str) -> str:
        answer = subprocess.run(
            [*LLMCTL, "status", run_id, "--json"],
            stdout=subprocess.PIPE,
            env=self._environment,
            text=True,
            check=False,
        )
        return _state_of(run_id, json.loads(answer.stdout)) if answer.returncode == 0 else "unknown"

    def _follow(self, *arguments: str) -> int:
        """Run llmctl in the foreground. Ctrl-C ends the following, not the run."""
        code = self._llmctl(*arguments)
        if code == INTERRUPTED:
            print("make demo follows it again.")
        return code

    def _llmctl(self, *arguments: str) -> int:
        print("$ llmctl " + " ".join(arguments), flush=True)
        process = subprocess.Popen([*LLMCTL, *arguments], env=self._environment, cwd=ROOT)
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # The terminal sends Ctrl-C to llmctl too, which prints a line and exits with 130.
                continue

    def _trainer(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "trainer", *arguments]
        done = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, check=False)
        if done.returncode:
            sys.exit(f"{done.stderr}{' '.join(arguments)} ended with exit code {done.returncode}")
        return done.stdout

    def _unigram_loss(self, run_dir: Path) -> float:
        from trainer.data.samples.sources import open_sources
        from trainer.planning.build_config import load_config

        sources = open_sources(load_config(run_dir / "config.yaml"))
        train, valid = sources["train"], sources["valid"]
        return unigram_loss(train.tokens, train.sequences, valid.sequences, VOCAB_SIZE, EVALUATED)


def _is_intact(mark: Path, fingerprint: str) -> bool:
    try:
        prepared = json.loads(mark.read_text())
        return prepared["fingerprint"] == fingerprint and all(
            hashlib.sha256((mark.parent / name).read_bytes()).hexdigest() == digest
            for name, digest in prepared["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _losses(metrics: Path) -> list[float]:
    """Losses by iteration; the last row of an iteration counts after a resume."""
    rows: dict[int, float] = {}
    for line in metrics.read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        if "lm_loss" in row:
            rows[row["iteration"]] = row["lm_loss"]
    return [loss for _, loss in sorted(rows.items())]


def _state_of(run_id: str, document: Any) -> str:
    runs = document["runs"] if isinstance(document, dict) else document
    return str(next(run["state"] for run in runs if run["run_id"] == run_id))


def unigram_loss(
    tokens: IndexedDataset, train: range, held_out: range, vocab_size: int, most: int | None = None
) -> float:
    """Mean nats per held-out token, under the training tokens' frequencies plus one.

    Adding one (Laplace's rule) keeps the loss finite for held-out tokens absent from training. ``most``: number of
    held-out tokens that count, from the first on; None: all.
    """
    import numpy as np

    from trainer.data.indexed.index_format import CHUNK

    def counts(sequences: range, most: int | None = None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        found = np.zeros(vocab_size, np.int64)
        start, stop = tokens.first_token(sequences.start), tokens.first_token(sequences.stop)
        stop = stop if most is None else min(stop, start + most)
        for first in range(start, stop, CHUNK):
            found += np.bincount(tokens.read(first, min(stop, first + CHUNK)), minlength=vocab_size)
        return found

    seen, wanted = counts(train) + 1, counts(held_out, most)
    return float(-(wanted * np.log(seen / seen.sum())).sum() / wanted.sum())


def _say(headline: str) -> None:
    print(f"\n=== {headline}", flush=True)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG)
    parser.add_argument("--new", action="store_true", help="start a new run, even if the last one did not complete")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for llmctl submit")
    parser.add_argument("--folder", type=Path, default=ROOT / ".demo", help="folder of the data and the runs")
    parser.add_argument("--text", type=Path, help="folder of .py files to train on; unset: the standard library's")
    options = parser.parse_args()
    try:
        return Demo(options.folder.resolve(), options.text).run(options.config, options.new, options.set)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
