"""Arguments of a script: their number is that with which the script goes on; each that a flag needs is asked for."""

from datetime import datetime
from pathlib import Path

import pytest

from llmctl.errors import UsageError
from llmctl.scripts.import_script import flags_of

NOW = datetime(2026, 1, 2, 3, 4, 5)
COUNTED = """if [ $# -ne 3 ]; then echo "Usage: $0 SIZE LR DATA"; exit 1; fi
SIZE=$1; shift; LR=$1; shift
torchrun --nproc_per_node 1 pretrain_gpt.py --num-layers $SIZE --lr $LR
"""
NAMED = """while [ $# -gt 0 ]; do case $1 in --size) SIZE=$2; shift 2;; esac; done
if [ -z "$SIZE" ]; then echo "usage: train.sh --size N"; exit 1; fi
torchrun --nproc_per_node 1 pretrain_gpt.py --num-layers $SIZE
"""

ENDS = """if [ -z "$SIZE" ]; then echo "usage: SIZE=N bash train.sh"; exit 1; fi
torchrun --nproc_per_node 1 pretrain_gpt.py --num-layers $SIZE
"""


def words(folder: Path, text: str, **given: str) -> list[str]:
    path = folder / "train.sh"
    path.write_text(text)
    groups = flags_of(path, {name.lstrip("_"): value for name, value in given.items()}, NOW)
    return [word if group.missing is None else group.missing.problem for group in groups for word in group.words[1:]]


def test_a_script_that_counts_its_arguments_asks_for_those_that_its_flags_need(tmp_path: Path) -> None:
    asked = ["the script's argument $1 is not set; give the value with --arg 1=VALUE", "0.1"]
    assert words(tmp_path, COUNTED, _2="0.1") == asked
    assert words(tmp_path, COUNTED, _1="2", _2="0.1") == ["2", "0.1"]


def test_a_script_that_ends_shows_its_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"line 1: the script ends here .* \(usage: SIZE=N bash train\.sh\)"):
        words(tmp_path, ENDS)


def test_a_named_argument_is_asked_for_by_its_variable(tmp_path: Path) -> None:
    assert "--arg SIZE=VALUE" in words(tmp_path, NAMED)[0]
    assert words(tmp_path, NAMED, SIZE="2") == ["2"]
    assert words(tmp_path, NAMED, _1="--size", _2="3") == ["3"]
