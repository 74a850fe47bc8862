"""The walk of ``build_data``: files that it passes through while it opens the data of a run.

Method: as in tests/llmctl/submit/test_walk.py. The program behind ``llmctl data prepare`` writes a small dataset, and
the config is that of examples/gpt_small.yaml with this dataset. ``build_data`` runs once before the recorded run. A
stay is a maximal run of consecutive calls into one file.
"""

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.llmctl.submit.test_walk import Walk
from trainer.config.train_config import TrainConfig
from trainer.data.commands.preprocess import main
from trainer.data.loading.build import build_data
from trainer.planning.build_config import build_config

ROOT = Path(__file__).parents[4]
# The rules about an index are a file that llmctl's checks before the queue share.
MAX_STAYS = 39
MAX_FILES = 14
MAX_STAYS_WITH_TOKENIZER = 47
MAX_FILES_WITH_TOKENIZER = 16


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Prefix of a prepared dataset of 40 documents."""
    text = tmp_path / "text.jsonl"
    lines = [" ".join(str((7 * line + place) % 97) for place in range(200)) for line in range(40)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    numbers = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--append-eod"]
    assert main([str(text), "--output", str(tmp_path / "d"), *numbers]) == 0
    return tmp_path / "d_text_document"


def stays_of(config: TrainConfig) -> list[str]:
    """The file of each stay of ``build_data``."""
    assert build_data(config, 0, 1).has("train")
    walk, before = Walk(), sys.getprofile()
    try:
        sys.setprofile(walk.note)
        build_data(config, 0, 1)
    finally:
        sys.setprofile(before)
    return [file for file, _ in groupby(walk.files)]


@pytest.mark.parametrize(
    ("data", "model", "max_stays", "max_files"),
    [
        ({}, {}, MAX_STAYS, MAX_FILES),
        (
            {"tokenizer_type": "NullTokenizer"},
            {"vocab_size": 100},
            MAX_STAYS_WITH_TOKENIZER,
            MAX_FILES_WITH_TOKENIZER,
        ),
    ],
    ids=["data", "data and tokenizer"],
)
def test_opening_data_passes_through_few_files(
    prefix: Path, data: dict[str, Any], model: dict[str, Any], max_stays: int, max_files: int
) -> None:
    values = yaml.safe_load((ROOT / "examples/gpt_small.yaml").read_text())
    values["data"] = {"data_path": str(prefix), **data}
    values["model"] |= model
    stays = stays_of(build_config(values))
    assert {"trainer/data/loading/build.py", "trainer/data/samples/gpt_dataset.py"} <= set(stays)
    assert len(set(stays)) <= max_files, sorted(set(stays))
    assert len(stays) <= max_stays, stays
    assert stays.count("trainer/data/tokenizers/factory.py") == bool(data), "the tokenizer is opened once"
