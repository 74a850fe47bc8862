"""``llmctl checkpoint show``: a page for people, one JSON document, and a model section that can be copied."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.llmctl.documents import problems_of
from tests.trainer.families.published_models import published
from trainer.commands import checkpoint as command
from trainer.commands.model_description import describe_model
from trainer.commands.model_page import render_page
from trainer.config.sections.model import ModelConfig
from trainer.families.catalogue import FAMILIES
from trainer.hub.folder import HubFolder

pytest.importorskip("transformers")

STORED = Path(__file__).parents[2] / "recorded/checkpoint_version_1/iter_0000003"


def saved(name: str, folder: Path, **changes: Any) -> Path:
    """The tiny model of a family as transformers saves it."""
    published(next(family for family in FAMILIES if family.model_type == name), **changes).save_pretrained(folder)
    return folder


def with_tokenizer(folder: Path) -> Path:
    """The folder with a tokenizer of four tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


@pytest.fixture
def shown(capsys) -> Callable[..., str]:
    """Runs the command; returns what it prints."""

    def run(*words: str | Path, code: int = 0) -> str:
        capsys.readouterr()
        assert command.main(["show", *map(str, words)]) == code
        return str(capsys.readouterr().out)

    return run


def section_of(page: str) -> dict[str, Any]:
    """The section at the end of a page."""
    found: dict[str, Any] = yaml.safe_load(page[page.index("\nmodel:") :])["model"]
    return found


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3", "gemma3_text", "bert", "t5"])
def test_a_folder_is_shown_with_a_section_that_makes_its_model(name: str, shown, tmp_path) -> None:
    folder = saved(name, tmp_path / "hub")
    page, document = shown(folder), json.loads(shown(folder, "--json"))
    assert problems_of("checkpoint-show", document) == []
    assert all(len(line) <= 80 for line in page.splitlines() if str(tmp_path) not in line)
    with HubFolder(folder, may_lack_heads=True) as source:
        assert ModelConfig(**section_of(page)) == ModelConfig(**document["model"]) == source.model
        held = sum(math.prod(source.shape(ours)) for ours, rule in source.weights.items() if rule.is_parameter)
    counts = document["parameters"]
    layers = sum(layers["count"] * layers["parameters"] for layers in counts["layers"])
    assert counts["total"] == held == counts["embedding"] + layers + counts["head"] + counts["ends"]
    assert f"{counts['total']:,}" in page and f"(model_type {name})" in page
    assert ("for each token" in page) == (name in ("mixtral", "deepseek_v3"))
    assert document["weights"]["tensors"] == {"float32": len(document["tensors"])}


def test_a_folder_with_all_its_files(shown, tmp_path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 16, "rope_theta": 1e4}
    folder = with_tokenizer(saved("llama", tmp_path / "hub", rope_parameters=scaling))
    page = " ".join(shown(folder).split())
    assert "rope, base 10,000, llama3 (factor 8.0, high_freq_factor 4.0" in page
    assert "HuggingFaceTokenizer, 4 tokens, eos 3 </s>; the table has" in page
    assert "tensors in float32; 1 file of" in page


def test_tensors_are_listed_on_request(shown, tmp_path) -> None:
    folder = saved("llama", tmp_path / "hub")
    assert "up_proj" not in shown(folder)
    rows = [line.split() for line in shown(folder, "--tensors").splitlines()]
    first = rows.index(["tensor", "dtype", "shape"])
    names = {row[0] for row in rows[first + 1 :] if row[1:2] == ["float32"]}
    with HubFolder(folder) as source:
        assert names == source.stored.keys()


def test_a_checkpoint_of_a_run(shown) -> None:
    page = " ".join(shown(STORED.parent).split())
    assert "no published family; nearest is GPT-2, which differs in num_query_groups, activation_func" in page
    assert "iteration 3, 24 samples seen" in page and "layout tp 2, pp 2, dp 1" in page
    assert "optimizer adam, 3 steps; training can go on" in page


def test_an_imported_checkpoint(shown, tmp_path) -> None:
    folder = with_tokenizer(saved("llama", tmp_path / "hub"))
    assert command.main(["import", str(folder), "--output", str(tmp_path / "native")]) == 0
    page = shown(tmp_path / "native")
    assert "imported; iteration 0, weights only" in page and "Llama (model_type llama)" in page
    assert "4 tokens, eos 3 </s>" in page
    with HubFolder(folder) as source:
        assert ModelConfig(**section_of(page)) == source.model


def test_a_folder_without_weights_is_shown_with_the_reason(shown, tmp_path) -> None:
    folder = saved("llama", tmp_path / "hub")
    section = section_of(shown(folder))
    (folder / "model.safetensors").unlink()
    page = shown(folder, code=3)
    words = " ".join(page.split())
    assert "cannot be loaded: " in words and "is missing, although config.json is there" in words
    assert section_of(page) == section
    document = json.loads(shown(folder, "--json", code=3))
    assert "model.safetensors: is missing" in document["problem"] and problems_of("checkpoint-show", document) == []


def test_a_folder_of_an_unknown_family_is_shown_with_the_reason(shown, tmp_path) -> None:
    keys = {"model_type": "mamba", "hidden_size": 64, "layers": ["a", "b"]}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    page = shown(tmp_path, code=3)
    assert "state-space layers" in page
    assert yaml.safe_load(page[page.index("\nconfig.json:") :])["config.json"] == keys


def test_a_terminal_has_colours_and_a_pipe_has_none(monkeypatch) -> None:
    found = describe_model(STORED)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = render_page(found, with_tensors=True, is_for_people=True)
    plain = render_page(found, with_tensors=True, is_for_people=False)
    assert "\x1b[" in coloured and "\x1b" not in plain and len(coloured.splitlines()) == len(plain.splitlines())


def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "trainer", "checkpoint", "show", str(STORED), "--tensors"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
