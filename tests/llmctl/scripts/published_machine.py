"""The files that the published scripts expect on their machines, small: tokenizers, data and starting checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from llmctl.context import Context
from llmctl.scripts.import_script import import_script
from llmctl.submit.job import SubmitArguments
from llmctl.submit.plan import plan_submission
from tests.llmctl.scripts.published_scripts import given_to, path_of
from tests.resume_torture import free_port
from tests.trainer.data.vocabularies import TEXTS, make_vocabularies
from trainer.__main__ import main
from trainer.data.commands.preprocess import main as prepare

HAS_START = {
    "geniac_llama3_8b": "data/checkpoints/llama8b_tp1_pp1",
    "tsubame_llama3_8b": "data/hf-to-megatron/tp1-pp1",
    "tsubame_mixtral_8x7b": "data/hf-to-megatron/tp1-pp1",
}
"""Script -> folder of the checkpoint that it starts from."""
_COPIES = 8
"""Of the text, so that a split of 998,1,1 has something to validate on."""


@dataclass(frozen=True)
class Machine:
    """A folder with the files of all scripts; paths of theirs that begin with /data begin with ``folder``/data.

    Attributes:
        folder: working directory of the scripts.
    """

    folder: Path

    def make(self) -> None:
        """Make tokenizers and data, each prepared as the script's program prepares its own."""
        vocabularies = make_vocabularies(self.folder / "vocabularies")
        made = vocabularies.folder
        for source, target in {
            made / "gpt2/vocab.json": "dataset/gpt2-vocab.json",
            made / "gpt2/merges.txt": "dataset/gpt2-merges.txt",
            made / "vocab.txt": "bert-vocab.txt",
            made / "bpe.model": "data/tokenizer/tokenizer.model",
            made / "tokenizer.json": "data/hf/tokenizer.json",
        }.items():
            (self.folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, self.folder / target)
        text = self.folder / "text.jsonl"
        text.write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS * _COPIES), encoding="utf-8")
        gpt2 = (
            "GPT2BPETokenizer",
            "--vocab-file",
            "dataset/gpt2-vocab.json",
            "--merge-file",
            "dataset/gpt2-merges.txt",
        )
        bert = ("BertWordPieceLowerCase", "--vocab-file", "bert-vocab.txt", "--split-sentences")
        piece = ("SentencePieceTokenizer", "--tokenizer-model", "data/tokenizer/tokenizer.model")
        hub = ("HuggingFaceTokenizer", "--tokenizer-model", "data/hf/tokenizer.json")
        for prefix, words in {
            "dataset/books": (*gpt2, "--append-eod"),
            "dataset/arxiv": (*piece, "--append-eod"),
            "data/corpus": bert,
            "data/tokenized/whole": (*piece, "--append-eod"),
            "data/ja_wiki": (*hub, "--append-eod"),
            "data/en_wiki": (*hub, "--append-eod"),
        }.items():
            flags = ["--input", "text.jsonl", "--output-prefix", prefix, "--tokenizer-type", *words, "--workers", "1"]
            assert prepare(flags) == 0, prefix
        for path in (self.folder / "data/tokenized").glob("whole_*"):
            path.rename(path.with_name(path.name.removeprefix("whole_")))

    def script(self, name: str) -> Path:
        """The script, with its absolute paths below the folder."""
        path = self.folder / f"{name}.sh"
        path.write_text(path_of(name).read_text(encoding="utf-8").replace("/data/", f"{self.folder}/data/"))
        return path

    def given(self, name: str) -> dict[str, str]:
        """Arguments of the script: its open variables, and small sizes."""
        own = {}
        if name == "tanuki_phase1":
            own = {"megatron_deepspeed_dir": str(self.folder), "output_model_dir": str(self.folder / "tanuki")}
            own["input_tokenizer_file"] = str(self.folder / "data/tokenizer/tokenizer.model")
        return {**given_to(name, is_small=True), **own}

    def config(self, name: str, **settings: Any) -> dict[str, Any]:
        """The config that ``submit`` would give the run, after all of its checks of data and checkpoints."""
        context = Context.of((), (), dict(os.environ))
        values: dict[str, Any] = {"training.device": "cpu", "job.nodes": 1, "job.gpus_per_node": 1}
        values |= {"job.resource_type": None, "job.priority": None}  # those of the script's own site
        if "wandb_project" in import_script(self.script(name), name, self.given(name), _NOW).sections.get(
            "logging", {}
        ):
            values["logging.wandb_project"] = None  # it would send the numbers away
        arguments = SubmitArguments(
            config=str(self.script(name)),
            cluster="local",
            script_arguments=[f"{key}={value}" for key, value in self.given(name).items()],
            settings={**values, **settings},
            dry_run=True,
        )
        return dict(plan_submission(context, arguments).record.config or {})


_NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def train_all(folder: Path, names: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Make the machine, and train each script there, after its start; the exit codes are in files ``code``.

    Runs in a process of its own.
    """
    os.environ |= dict(environ)
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_RDWR)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    for descriptor, target in ((nowhere, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    machine = Machine(folder)
    machine.make()
    for name in names:
        start = HAS_START.get(name)
        if start is not None:
            first = {"checkpoint.load": None, "checkpoint.save": str(folder / start), "training.train_iters": 1}
            first |= {f"checkpoint.{key}": False for key in ("finetune", "no_load_optim", "no_load_rng")}
            _train(folder / f"start-{name}", machine.config(name, **first))
        _train(folder / "runs" / name, machine.config(name, **{"logging.log_interval": 1}))
        for used in ("checkpoints", "data/checkpoints", "data/hf-to-megatron"):
            shutil.rmtree(folder / used, ignore_errors=True)


def _train(run_dir: Path, config: Mapping[str, Any]) -> None:
    (run_dir / "attempts" / "1").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LLMCTL_ATTEMPT"), "1"),
        **{"LLMCTL_RUN_DIR": str(run_dir), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }
    (run_dir / "code").write_text(str(main(["pretrain", "--config", str(run_dir / "config.yaml")])))
