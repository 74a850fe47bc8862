"""Python code of the guide on data: recipes of tokenizers, and a look at a sample of BERT."""

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.trainer.data.vocabularies import TEXTS, Vocabularies
from tests.waiting import HANG_S
from trainer.data.commands.preprocess import main
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings

GUIDE = Path(__file__).parents[4] / "docs/guide"
SETTINGS = {
    "tokenizer.json": TokenizerSettings(tokenizer_model="tokenizer.json"),
    "tokenizer.model": TokenizerSettings(tokenizer_model="tokenizer.model"),
    "vocab.txt": TokenizerSettings("BertWordPieceLowerCase", vocab_file="vocab.txt"),
}


def recipes(page: str = "tokenizers.md") -> list[str]:
    """The indented blocks of a page that import something."""
    lines = (GUIDE / page).read_text().splitlines()
    blocks = ["\n".join(line[4:] for line in part) for own, part in groupby(lines, _is_code) if own]
    return [block.strip() for block in blocks if "import" in block]


def _is_code(line: str) -> bool:
    return line.startswith("    ") or not line


@pytest.mark.parametrize("recipe", recipes())
def test_each_recipe_trains_a_tokenizer_that_restores_text(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("".join(TEXTS))
    program = recipe.replace("=4000", "=460")
    assert program != recipe
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, timeout=HANG_S)
    monkeypatch.chdir(tmp_path)
    (made,) = (name for name in SETTINGS if (tmp_path / name).exists())
    tokenizer = open_tokenizer(SETTINGS[made])
    assert tokenizer.vocab_size <= 460 and tokenizer.eod is not None
    text = "the naive cafe served 60"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_page_has_a_recipe_for_each_kind() -> None:
    assert len(recipes()) == len(SETTINGS)


def test_a_sample_of_bert_is_shown(vocabularies: Vocabularies, tmp_path: Path) -> None:
    vocabulary = vocabularies.folder / "vocab.txt"
    (tmp_path / "vocab.txt").write_bytes(vocabulary.read_bytes())
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "The naive cafe. It served 60. They are usual."}) + "\n")
    flags = ["--split-sentences", "--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary)]
    assert main([str(tmp_path / "text.jsonl"), "--output", str(tmp_path / "corpus"), *flags]) == 0
    (program,) = recipes("data.md")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(GUIDE.parents[1])},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usual" in done.stdout or "served" in done.stdout
