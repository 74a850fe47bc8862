"""The recipes of docs/guide/tokenizers.md train tokenizers that the trainer reads."""

import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.trainer.data.vocabularies import TEXTS
from tests.waiting import HANG_S
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings

PAGE = Path(__file__).parents[4] / "docs/guide/tokenizers.md"
SETTINGS = {
    "tokenizer.json": TokenizerSettings(tokenizer_model="tokenizer.json"),
    "tokenizer.model": TokenizerSettings(tokenizer_model="tokenizer.model"),
    "vocab.txt": TokenizerSettings("BertWordPieceLowerCase", vocab_file="vocab.txt"),
}


def recipes() -> list[str]:
    """The indented blocks of the page that import something."""
    lines = PAGE.read_text().splitlines()
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
