"""Tasks of lm-evaluation-harness: the same numbers as the harness's own model on the export, in every layout."""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.train_tokenizer import train_byte_level_bpe
from tests.llmctl.documents import problems_of
from tests.trainer.conversion.test_conversion import imported
from tests.trainer.data.token_files import write
from tests.trainer.data.vocabularies import TEXTS
from tests.trainer.evaluation.task_files import write_tasks
from tests.trainer.families.published_models import published
from tests.trainer.training.pretraining_job import Job
from trainer.commands import evaluate
from trainer.conversion.export_hub import Export, export_hub
from trainer.evaluation import task_list
from trainer.evaluation.task_list import load_tasks
from trainer.families.llama import LLAMA
from trainer.families.mixtral import MIXTRAL
from trainer.generation.source import ModelSource

# Their import takes seconds, also of workers that run other files.
pytestmark = pytest.mark.skipif(
    not (find_spec("lm_eval") and find_spec("accelerate")), reason="lm-eval or accelerate is not installed"
)

VOCABULARY = 300


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights, and a tokenizer whose texts begin with a token."""
    folder = tmp_path_factory.mktemp("hub")
    published(LLAMA, vocab_size=VOCABULARY, num_key_value_heads=2, eos_token_id=0, bos_token_id=0).save_pretrained(
        folder
    )
    train_byte_level_bpe(TEXTS, VOCABULARY, folder / "tokenizer.json")
    content = json.loads((folder / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "pad_token": "<|endoftext|>"}))
    return folder


@pytest.fixture(scope="module")
def checkpoints(hub_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native") / "checkpoints"
    imported(hub_folder, folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's data sets go to a folder of the test, and nothing is asked of the network."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def expected(
    checkpoints: Path, tasks: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, float]]:
    """Metrics of the export by the harness's model ``hf``."""
    import datasets.config
    from lm_eval.evaluator import evaluate as evaluate_with_harness
    from lm_eval.models.huggingface import HFLM

    root = tmp_path_factory.mktemp("export")
    [checkpoint] = checkpoints.glob("iter_*")
    export_hub(Export.open(checkpoint), root / "hub", lambda _: None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets.config, "HF_DATASETS_CACHE", root / "datasets")
        model = HFLM(pretrained=str(root / "hub"), device="cpu", dtype="float32", batch_size=4)
        found = evaluate_with_harness(model, load_tasks(tasks), bootstrap_iters=0, log_samples=False)
    return {
        task: {name.removesuffix(",none"): value for name, value in values.items() if isinstance(value, float | int)}
        for task, values in found["results"].items()
    }


def metrics_of(source: Path, tasks: list[str], capsys: Any, *more: str) -> dict[str, dict[str, float]]:
    capsys.readouterr()
    assert evaluate.main([str(source), "--tasks", ",".join(tasks), "--json", *more], dict(os.environ)) == 0
    document = json.loads(capsys.readouterr().out)
    assert problems_of("evaluate", document) == []
    metrics: dict[str, dict[str, float]] = document["tasks"]
    return metrics


@pytest.mark.parametrize(
    "layout", [(), ("--tensor-parallel", "2"), ("--pipeline-parallel", "2")], ids=["serial", "tp2", "pp2"]
)
def test_metrics_are_those_of_the_export(checkpoints, tasks, expected, capsys, layout: tuple[str, ...]) -> None:
    found = metrics_of(checkpoints, tasks, capsys, *layout)
    assert found.keys() == expected.keys() == {"choices", "continuations", "texts"}
    for task in ("choices", "continuations"):
        assert found[task] == expected[task]
    assert 0 < found["choices"]["acc"] < 1 and found["choices"]["acc_norm"] != found["choices"]["acc"]
    # A mean of logarithms in float32: rounding is near 1e-6.
    assert found["texts"] == pytest.approx(expected["texts"], rel=1e-5)


def test_metrics_of_divided_experts_are_those_of_one_rank(hub_folder, tasks, tmp_path, capsys) -> None:
    shutil.copytree(hub_folder, tmp_path / "hub")
    published(MIXTRAL, vocab_size=VOCABULARY, eos_token_id=0, bos_token_id=0).save_pretrained(tmp_path / "hub")
    imported(tmp_path / "hub", tmp_path / "native")
    serial = metrics_of(tmp_path / "native", tasks, capsys)
    divided = metrics_of(tmp_path / "native", tasks, capsys, "--expert-parallel", "2")
    for task in ("choices", "continuations"):
        assert divided[task] == serial[task]
    assert divided["texts"] == pytest.approx(serial["texts"], rel=1e-5)


def test_training_writes_the_metrics_of_its_tasks(hub_folder, checkpoints, tasks, tmp_path, capsys) -> None:
    write(tmp_path / "corpus", [list(range(1, 41))] * 20, vocab_size=VOCABULARY)
    source = ModelSource.open(checkpoints)
    config = {
        "model": source.config.model.model_dump(mode="json"),
        "parallel": {"tensor_model_parallel_size": 2},
        "training": {"train_iters": 3, "seq_length": 16, "eval_iters": 0, "device": "cpu"},
        "optimizer": {"lr": 1e-2},
        "data": {"data_path": [str(tmp_path / "corpus")], "split": "1,0,0", "tokenizer_model": str(hub_folder)},
        "checkpoint": {"load": str(checkpoints), "save_interval": 2},
        "evaluation": {"tasks": tasks[:2], "every": 2, "limit": 5},
    }
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with Job(run, 2) as job:
        assert job.ends([0, 1]) == [0, 0]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {row["iteration"]: row["tasks"] for row in rows if "tasks" in row}
    assert found.keys() == {2, 3}
    logs = [path.read_text() for path in run.rglob("rank-*.log")]
    assert len(logs) == 2 and not any("it/s]" in log or "%|" in log for log in logs)
    for iteration, metrics in found.items():
        saved = run / "checkpoints" / f"iter_{iteration:07d}"
        assert metrics == metrics_of(saved, tasks[:2], capsys, "--limit", "5")


BAD = {
    "an unknown task": (["--tasks", "helaswag"], "'helaswag' is none of the ", "such as hellaswag"),
    "a missing file": (["--tasks", "none.yaml"], "--tasks: none.yaml: there is no such file", ""),
    "no task": (["--tasks", ","], "--tasks: names no task", ""),
    "a file that is not a task": (["--tasks", "{folder}/bad.yaml"], "bad.yaml cannot be loaded", ""),
    "no data": (["--tasks", "{folder}/lost.yaml"], "lost.yaml cannot be loaded", "lost.jsonl"),
    "a task twice": (["--tasks", "{tasks},{tasks}"], "names a task twice", ""),
    "no text": ([], "--data-path: the model has no data of its own", ""),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(checkpoints, tasks, tmp_path, capsys, name: str) -> None:
    arguments, *words = BAD[name]
    (tmp_path / "bad.yaml").write_text("[1]")
    lost = yaml.safe_load(Path(tasks[0]).read_text())
    lost["dataset_kwargs"]["data_files"]["test"] = "lost.jsonl"
    (tmp_path / "lost.yaml").write_text(yaml.safe_dump(lost))
    filled = [argument.format(folder=tmp_path, tasks=tasks[0]) for argument in arguments]
    capsys.readouterr()
    assert evaluate.main([str(checkpoints), *filled], dict(os.environ)) == 3
    message = [line for line in capsys.readouterr().err.splitlines() if line.startswith("llmctl evaluate: ")]
    assert len(message) == 1 and all(word in message[0] for word in words), message


def test_a_missing_package_is_named(checkpoints, tasks, capsys, monkeypatch) -> None:
    monkeypatch.setattr(task_list, "find_spec", lambda _: None)
    assert evaluate.main([str(checkpoints), "--tasks", tasks[0]], dict(os.environ)) == 3
    assert "needs the package lm-eval; install it: pip install lm-eval\n" in capsys.readouterr().err


def test_a_task_that_needs_more_positions_is_named(checkpoints, tasks, tmp_path, capsys) -> None:
    long = yaml.safe_load(Path(tasks[1]).read_text())
    long["generation_kwargs"]["max_gen_toks"] = 64
    long["dataset_kwargs"]["data_files"]["test"] = str(Path(tasks[1]).with_name("items.jsonl"))
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(long))
    assert evaluate.main([str(checkpoints), "--tasks", str(tmp_path / "long.yaml")], dict(os.environ)) == 3
    assert "asks for 64 new tokens, but the model has 64 positions; set max_gen_toks" in capsys.readouterr().err


@pytest.mark.parametrize("layout", [("--tensor-parallel", "2"), ("--pipeline-parallel", "2")], ids=["tp2", "pp2"])
def test_perplexity_is_the_same_in_every_layout(checkpoints, tmp_path, capsys, layout: tuple[str, ...]) -> None:
    write(tmp_path / "corpus", [list(range(1, 100))] * 3, vocab_size=VOCABULARY)
    text = ["--data-path", str(tmp_path / "corpus"), "--data-split", "1,0,0", "--split", "train", "--json"]
    found = []
    for flags in ((), layout):
        capsys.readouterr()
        assert evaluate.main([str(checkpoints), *text, *flags], dict(os.environ)) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["tokens"] == found[1]["tokens"] == 3 * 99 - 1
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)
