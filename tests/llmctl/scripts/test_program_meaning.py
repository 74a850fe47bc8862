"""Defaults of pretrain_bert.py and pretrain_t5.py, which are not those of GPT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.llmctl.scripts.test_import_script import FLAGS, read

DATA = FLAGS.replace("--mock-data", "--data-path d") + " --micro-batch-size 1"


def found(program: str, flags: str, folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Section data, and the remarks."""
    imported = read(f"torchrun {program}.py {DATA} {flags}", folder)
    return dict(imported.sections["data"]), imported.remarks


@pytest.mark.parametrize(
    ("program", "flags", "kind", "extra_ids"),
    [
        ("pretrain_bert", "--vocab-file v.txt", "BertWordPieceLowerCase", None),
        ("pretrain_bert", "--vocab-file v.txt --tokenizer-type BertWordPieceCase", "BertWordPieceCase", None),
        ("pretrain_t5", "--vocab-file v.txt", "BertWordPieceLowerCase", 100),
        ("pretrain_t5", "--vocab-file v.txt --vocab-extra-ids 200", "BertWordPieceLowerCase", 200),
        ("pretrain_t5", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t", "HuggingFaceTokenizer", None),
        ("pretrain_gpt", "--vocab-file v.json --merge-file m.txt", None, None),
    ],
)
def test_the_tokenizer_that_megatron_takes(
    program: str, flags: str, kind: str | None, extra_ids: int | None, tmp_path: Path
) -> None:
    data, remarks = found(program, flags, tmp_path)
    assert (data.get("tokenizer_type"), data.get("vocab_extra_ids")) == (kind, extra_ids)
    assert any("has 100 sentinels" in remark for remark in remarks) is (extra_ids == 100)


def test_another_t5_than_megatrons_is_told(tmp_path: Path) -> None:
    _, remarks = found("pretrain_t5", "--vocab-file v.txt --vocab-extra-ids 100", tmp_path)
    assert len(remarks) == 1 and remarks[0].startswith("line 1: pretrain_t5.py: the model has the relative positions")
    assert found("pretrain_bert", "--vocab-file v.txt", tmp_path)[1] == ()
