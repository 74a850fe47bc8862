"""Ten steps of each imported script: its config at a small size, with data, tokenizers and checkpoints made for it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.published_corpus.small_config import DATA, ITERATIONS, NULL_VOCABULARY, Sections, small_config
from llmctl.context import Context
from llmctl.errors import UsageError
from llmctl.submit.job import SubmitArguments
from llmctl.submit.plan import plan_submission
from tests.resume_torture import free_port
from tests.trainer.data.vocabularies import TEXTS, make_vocabularies
from trainer.__main__ import main
from trainer.config.blends import weight_places
from trainer.data.commands.preprocess import main as prepare

TRAINS = "trains"
_LIMIT_S, _COPIES = 180, 160
_BERT = ("BertWordPieceLowerCase", "BertWordPieceCase")


class Trials:
    """A folder with a small corpus, prepared for every kind of tokenizer, and the trials so far."""

    def __init__(self, folder: Path) -> None:
        """Make the corpus below ``folder``."""
        self._folder = folder
        self._known: dict[str, str] = {}
        made = make_vocabularies(folder / "vocabularies").folder
        self._files = {"vocab": made / "gpt2/vocab.json", "merges": made / "gpt2/merges.txt"}
        self._files |= {"pieces": made / "bpe.model", "words": made / "vocab.txt", "hub": made / "tokenizer.json"}
        self._text, self._ids = folder / "text.jsonl", folder / "ids.jsonl"
        self._text.write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS * _COPIES), encoding="utf-8")
        ids = [" ".join(str(byte) for byte in one.encode()) for one in TEXTS * _COPIES]
        self._ids.write_text("".join(json.dumps({"text": one}) + "\n" for one in ids), encoding="utf-8")

    def outcome_of(self, sections: Mapping[str, Mapping[str, Any]]) -> str:
        """TRAINS, or the reason why the ten steps were not made; equal configs are trained once."""
        shape = json.dumps(small_config(sections, Path("/")), sort_keys=True)
        if shape not in self._known:
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                self._known[shape] = _in_a_process(self, sections, Path(folder))
        return self._known[shape]

    @property
    def trained(self) -> int:
        """Number of distinct configs."""
        return len(self._known)

    def try_in(self, sections: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
        """The outcome of a config whose files are made in ``folder``; in the process that calls."""
        config = small_config(sections, folder)
        self._make_files(config.get("data", {}))
        checkpoint = config.get("checkpoint", {})
        if checkpoint.get("load") not in (None, checkpoint.get("save")):
            start = {**config, "checkpoint": {"save": checkpoint["load"]}}
            start["training"] = {**config["training"], "exit_interval": 1}
            reason = _train(start, folder / "start", 1)
            if reason != TRAINS:
                return f"start: {reason}"
        return _train(config, folder / "run", ITERATIONS)

    def _make_files(self, data: dict[str, Any]) -> None:
        kind = data.get("tokenizer_type")
        names = _names(kind, "vocab_file" in data)
        flags = [] if kind is None else ["--tokenizer-type", kind]
        flags += ["--vocab-size", str(NULL_VOCABULARY)] if kind == "NullTokenizer" else []
        for key, name in names.items():
            if key in data:
                _copy(self._files[name], Path(data[key]), is_folder=name == "hub")
                flags += [f"--{key.replace('_', '-')}", data[key]]
        flags += ["--split-sentences"] if kind in _BERT else ["--append-eod"]
        prefixes = [
            Path(entry)
            for entries in (data.get(key, []) for key in DATA)
            for place, entry in enumerate(entries)
            if place not in weight_places(entries)
        ]
        for prefix in prefixes:
            made = self._prepared(kind or "-".join(names.values()), flags)
            for file in made.parent.glob(f"{made.name}*"):
                shutil.copy(file, prefix.with_name(prefix.name + file.name.removeprefix(made.name)))

    def _prepared(self, kind: str, flags: list[str]) -> Path:
        """A dataset of the corpus for one kind of tokenizer, without ending; made once."""
        folder = self._folder / f"prepared-{kind}"
        if not folder.is_dir():
            making = folder.with_name(f"{folder.name}.part")
            making.mkdir(exist_ok=True)
            text = self._ids if kind == "NullTokenizer" else self._text
            words = ["--input", str(text), "--output-prefix", str(making / "text"), *flags, "--workers", "1"]
            if prepare(words) != 0:
                raise RuntimeError(f"data are not prepared: {' '.join(flags)}")
            making.rename(folder)
        return next(folder.glob("*.bin")).with_suffix("")


def _names(kind: str | None, has_vocabulary: bool) -> dict[str, str]:
    """Key of a file -> the file that a tokenizer of this kind takes."""
    if kind in _BERT:
        return {"vocab_file": "words"}
    if kind is None and has_vocabulary or kind == "GPT2BPETokenizer":
        return {"vocab_file": "vocab", "merge_file": "merges"}
    return {"tokenizer_model": "hub" if kind == "HuggingFaceTokenizer" else "pieces"}


def _copy(source: Path, target: Path, *, is_folder: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_folder:
        target.mkdir(exist_ok=True)
        shutil.copy(source, target / source.name)
    else:
        shutil.copy(source, target)


def _train(config: Sections, run_dir: Path, last: int) -> str:
    """TRAINS if iteration ``last`` was made, else a reason; after all checks that come before the queue."""
    (run_dir / "attempts" / "1").mkdir(parents=True)
    written = run_dir / "config.yaml"
    written.write_text(yaml.safe_dump(config), encoding="utf-8")
    arguments = SubmitArguments(
        config=str(written), cluster="local", settings={"job.nodes": 1, "job.gpus_per_node": 1}, dry_run=True
    )
    try:
        plan = plan_submission(Context.of((), (), dict(os.environ)), arguments)
    except UsageError as error:
        return str(error)
    written.write_text(yaml.safe_dump(dict(plan.record.config or {})), encoding="utf-8")
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LLMCTL_ATTEMPT"), "1"),
        **{"LLMCTL_RUN_DIR": str(run_dir), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }
    code = main(["pretrain", "--config", str(written)])
    rows = (run_dir / "metrics.jsonl").read_text().splitlines() if (run_dir / "metrics.jsonl").is_file() else []
    steps = [row for row in map(json.loads, rows) if "iteration_time_s" in row]
    if code != 0 or not steps or steps[-1]["iteration"] != last:
        return f"exit code {code} after {len(steps)} steps"
    return TRAINS


def _child(trials: Trials, sections: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Write the outcome of a trial, whose output goes to a file."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.chdir(folder)
    try:
        outcome = trials.try_in(sections, folder)
    except (Exception, SystemExit) as error:
        outcome = f"{type(error).__name__}: {error}"
    (folder / "outcome").write_text(outcome, encoding="utf-8")


def _in_a_process(trials: Trials, sections: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_child, args=(trials, sections, folder))
    process.start()
    process.join(_LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
        return f"no end within {_LIMIT_S} s"
    outcome = folder / "outcome"
    text = outcome.read_text(encoding="utf-8") if outcome.is_file() else f"exit code {process.exitcode}"
    return text if text == TRAINS else _with_cause(text, (folder / "log").read_text(encoding="utf-8", errors="replace"))


def _with_cause(outcome: str, log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    shown = re.sub(r"/\S*/tmp\w+", "", f"{outcome}: {lines[-1] if lines else ''}")
    return shown[:300]
