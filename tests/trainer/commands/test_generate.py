"""Generate and evaluate in one process on a checkpoint that two tensor-parallel ranks wrote."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from examples.demo import unigram_loss
from examples.train_tokenizer import train_byte_level_bpe
from tests.llmctl.documents import problems_of
from tests.trainer.data.token_files import write
from tests.trainer.families.published_models import published
from tests.trainer.model.reference_gpt import reference_loss
from tests.trainer.training.pretraining_job import Job
from trainer.checkpoint.checksums import checksum_of_metadata
from trainer.checkpoint.find import find_checkpoint
from trainer.commands import evaluate, generate
from trainer.data.commands.preprocess import tokenize_documents
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import read_manifest
from trainer.data.samples.sources import open_sources
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.families.llama import LLAMA
from trainer.generation.load import load_generation_model
from trainer.generation.model import GenerationModel
from trainer.generation.settings import GenerationSettings
from trainer.generation.source import ModelSource

VERSE = "one for sorrow, two for joy, three for a girl, four for a boy; "


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a model trained on VERSE: tokenizer.json, d.bin, checkpoints/.

    Trained with TP 2 and sequence parallelism.
    """
    folder = tmp_path_factory.mktemp("run")
    train_byte_level_bpe([VERSE] * 3, 280, folder / "tokenizer.json")
    tokenize_documents(
        [VERSE * 40] * 10,
        open_tokenizer(TokenizerSettings(tokenizer_model=str(folder / "tokenizer.json"))),
        folder / "d",
    )
    config = {
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "position_embedding_type": "rope",
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        },
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "training": {
            "train_iters": 60,
            "seq_length": 32,
            "micro_batch_size": 4,
            "eval_iters": 0,
            "device": "cpu",
        },
        "optimizer": {"lr": 1e-2, "lr_decay_style": "constant"},
        "data": {
            "data_path": str(folder / "d"),
            "tokenizer_model": str(folder / "tokenizer.json"),
            "split": "80,20,0",
        },
        "checkpoint": {"save": str(folder / "checkpoints")},
        "logging": {"log_interval": 20},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with Job(folder, 2) as job:
        assert job.ends(range(2)) == [0, 0]
    return folder


@pytest.fixture(scope="module")
def serial(trained: Path) -> GenerationModel:
    return load_generation_model(ModelSource.open(trained))


def greedy(model: GenerationModel, count: int, *stop_tokens: int) -> list[int]:
    settings = GenerationSettings(count, temperature=0, stop_tokens=frozenset(stop_tokens))
    return model.generate([[5]], settings)[0].tokens


def test_generation_continues_the_verse(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = [
        "--checkpoint",
        str(trained),
        "--prompt",
        "one for sorrow,",
        "--max-new-tokens",
        "30",
        "--temperature",
        "0",
    ]
    assert generate.main(arguments, {**os.environ, "LLMCTL_CACHE_DIR": str(tmp_path)}) == 0
    said = capsys.readouterr()
    assert "llmctl generate: kernels: " in said.err and "instead of native: the library is not" in said.err
    text = said.out.rstrip("\n")
    assert len(text) > 40
    assert (VERSE * 3).startswith(text)


def test_the_text_goes_on_past_the_length_of_training(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(trained), "--prompt", "one for", "--temperature", "0", "--max-tokens", "80", "--json"]
    assert generate.main(words, {}) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ending"], answer["tokens"]) == ("length", 80) and problems_of("generate", answer) == []
    source = ModelSource.open(trained)
    assert source.reaching(20) is source
    table = source.config.model.model_copy(update={"position_embedding_type": "learned_absolute"})
    with_table = replace(source, config=source.config.model_copy(update={"model": table}))
    assert with_table.reaching(80) is with_table


def test_a_prompt_is_bold_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert generate._shown_prompt("once") == "once"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert generate._shown_prompt("once") == "\x1b[1monce\x1b[22m"


def test_the_command_starts_its_own_ranks(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        str(trained),
        "--prompt",
        "one for",
        "--prompt",
        "two",
        "--temperature",
        "0",
        "--max-tokens",
        "6",
        "--json",
    ]
    assert generate.main(words, {}) == 0
    alone = capfd.readouterr().out
    assert generate.main([*words, "--stop", "never", "--tensor-parallel", "2"], {}) == 0
    said = capfd.readouterr()
    assert said.out == alone
    assert [json.loads(line)["ending"] for line in alone.splitlines()] == ["length", "length"]
    assert multiprocessing.active_children() == []


def test_a_rank_that_fails_is_told_and_leaves_no_process(
    trained: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its part of the weights is missing: rank 1 alone reads the last layer."""
    folder = shutil.copytree(trained / "checkpoints" / "iter_0000060", tmp_path / "iter_0000060")
    metadata = json.loads((folder / "metadata.json").read_text())
    del metadata["tensors"]["model"]["layers.1.mlp.fc1.weight"]
    (folder / "metadata.json").write_text(json.dumps(metadata | {"checksum": checksum_of_metadata(metadata)}))
    words = [str(folder), "--prompt", "one", "--tokenizer", str(trained / "tokenizer.json"), "--pipeline-parallel", "2"]
    assert generate.main(words, {}) != 0
    message = capfd.readouterr().err
    assert "rank 1: " in message and "has no tensor layers.1.mlp.fc1.weight" in message
    assert "Traceback" not in message
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("backend", ["compile", "nvrtc"])
def test_a_checkpoint_with_a_removed_kernel_backend_is_read(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    folder = shutil.copytree(trained / "checkpoints" / "iter_0000060", tmp_path / "iter_0000060")
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata["config"]["training"]["kernel_backend"] = backend
    (folder / "metadata.json").write_text(json.dumps(metadata | {"checksum": checksum_of_metadata(metadata)}))
    note = f"training.kernel_backend: {backend}, of an earlier release, is taken as auto\n"
    words = [str(folder), "--prompt", "one for", "--max-tokens", "2", "--tokenizer", str(trained / "tokenizer.json")]
    assert generate.main(words, {}) == 0
    assert f"llmctl generate: {note}" in capsys.readouterr().err
    assert evaluate.main([str(folder), "--data-path", str(trained / "d"), "--max-tokens", "40"], {}) == 0
    assert f"llmctl evaluate: {note}" in capsys.readouterr().err


def test_the_text_ends_where_documents_did_in_training(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any end token of the present tokenizer, or none."""
    stops: list[set[int]] = []

    def remember(_: object, request: Any, *__: object, **___: object) -> None:
        stops.append(request.settings.stop_tokens)

    monkeypatch.setattr(generate, "_continue", remember)
    values = json.loads((trained / "tokenizer.json").read_text())
    for token in values["added_tokens"]:
        token["content"] = "<another>"
    values["model"]["vocab"]["<another>"] = values["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    for tokenizer in (trained, tmp_path):
        arguments = ["--checkpoint", str(trained), "--prompt", "", "--tokenizer", str(tokenizer / "tokenizer.json")]
        assert generate.main(arguments, {}) == 0
    manifest = read_manifest(trained / "d")
    assert manifest is not None
    assert stops == [{manifest.eod}] * 2 != [{None}] * 2


def test_a_stop_token_ends_the_text(serial: GenerationModel) -> None:
    whole = greedy(serial, 10)
    assert greedy(serial, 10, whole[4]) == whole[: whole.index(whole[4])]
    assert greedy(serial, 0) == []


def test_evaluation_equals_an_independent_model(
    trained: Path, serial: GenerationModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main(["--checkpoint", str(trained / "checkpoints"), "--json"], os.environ) == 0
    found = json.loads(capsys.readouterr().out)
    assert problems_of("evaluate", found) == []
    valid = open_sources(serial.config)["valid"]
    text = np.concatenate([valid.tokens[number] for number in valid.sequences]).astype(np.int64)
    weights = {name: weight.detach()[: serial.vocab_size] for name, weight in _weights(serial).items()}
    loss = 0.0
    for start in range(0, len(text) - 1, 32):
        window = torch.from_numpy(text[start : start + 33])[None]
        loss += reference_loss(weights, serial.config.model, window[:, :-1], window[:, 1:]).item()
    assert found["tokens"] == len(text) - 1
    assert found["loss"] == pytest.approx(loss / found["tokens"], abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    # The split starts with the first word's token, which is input and not predicted.
    first = len(
        open_tokenizer(TokenizerSettings(tokenizer_model=str(trained / "tokenizer.json"))).decode([int(text[0])])
    )
    text_bytes = 2 * 40 * len(VERSE) - first
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2) / text_bytes, rel=1e-4)
    assert found["iteration"] == 60


def test_numbers_that_are_not_finite_are_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = published(LLAMA, vocab_size=300)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.sign() * 3e38)
    model.save_pretrained(tmp_path / "model")
    write(tmp_path / "corpus", [list(range(1, 100))] * 3, vocab_size=300)
    text = ["--data-path", str(tmp_path / "corpus"), "--data-split", "1,0,0", "--split", "train", "--json"]
    capsys.readouterr()
    assert evaluate.main([str(tmp_path / "model"), *text], dict(os.environ)) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert "NaN" not in out and "Infinity" not in out and problems_of("evaluate", found) == []
    assert (found["loss"], found["perplexity"]) == (None, None)


def _weights(serial: GenerationModel) -> dict[str, torch.Tensor]:
    return dict(serial.model.parameters)


def test_evaluation_of_a_part(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--checkpoint", str(trained), "--split", "train", "--data-path", str(trained / "d")]
    assert evaluate.main([*arguments, "--max-tokens", "50"], os.environ) == 0
    assert "iter_0000060 on train, 50 tokens: loss " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("split", "cure"), [("valid", "use --split train, or --data-path with"), ("train", "use --data")]
)
def test_a_split_without_tokens_is_named_with_its_data_and_a_cure(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str, cure: str
) -> None:
    write(tmp_path / "few", [[1]], vocab_size=300)
    shares = ["--data-path", str(tmp_path / "few"), "--data-split", "1,1,0", "--split", split]
    assert evaluate.main([str(trained), *shares], os.environ) == 3
    message = capsys.readouterr().err
    assert f"--split: the {split} split of {tmp_path}/few has " in message and cure in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        (generate, ["--checkpoint", "{empty}", "--prompt", "x"], "holds no checkpoint; name a folder iter_*"),
        (generate, ["--checkpoint", "{run}", "--prompt", "x", "--tokenizer", "{empty}"], "holds no tokenizer.json"),
        (evaluate, ["--checkpoint", "{run}", "--split", "test"], "no test split, only train, valid"),
        (evaluate, ["--checkpoint", "{run}", "--data-path", "{empty}/x"], "x.bin and {empty}/x.idx: no such file"),
    ],
)
def test_refusals(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command, arguments: list[str], says: str
) -> None:  # type: ignore[no-untyped-def]
    filled = [argument.format(run=trained, empty=tmp_path) for argument in arguments]
    assert command.main(filled, os.environ) == 3
    message = capsys.readouterr().err
    assert says.format(empty=tmp_path) in message
    assert message.count("\n") == 1


def test_kernels_of_the_training_run_may_be_missing(trained: Path, serial: GenerationModel, tmp_path: Path) -> None:
    folder = shutil.copytree(trained / "checkpoints" / "iter_0000060", tmp_path / "iter_0000060")
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata["config"]["model"]["attention_backend"] = "flash"
    (folder / "metadata.json").write_text(json.dumps(metadata | {"checksum": checksum_of_metadata(metadata)}))
    elsewhere = load_generation_model(ModelSource.open(folder))
    assert greedy(elsewhere, 5) == greedy(serial, 5)


def test_a_checkpoint_is_found_from_three_places(trained: Path) -> None:
    folder = trained / "checkpoints" / "iter_0000060"
    assert find_checkpoint(trained) == find_checkpoint(trained / "checkpoints") == find_checkpoint(folder) == folder


def test_unigram_loss_is_the_entropy_of_counts(trained: Path) -> None:
    with IndexedDataset(trained / "d") as tokens:
        found = unigram_loss(tokens, range(8), range(8, 10), 280)
        counts = np.bincount(tokens[0], minlength=280)
    shares = counts[counts > 0] / counts.sum()
    # Both parts repeat the same verse: the cross entropy is the entropy, except for the added ones.
    assert found == pytest.approx(float(-(shares * np.log(shares)).sum()), abs=0.1)
