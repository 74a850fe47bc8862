"""--load and --save of one folder: fresh at first, and never saved over what a run starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.llmctl.scripts.test_import_script import TRAIN, config_of, read


def script(*flags: str) -> str:
    return " \\\n  ".join([TRAIN, "--save /w/ck", *flags])


def test_one_folder_for_both_means_go_on_or_start_fresh(tmp_path: Path) -> None:
    config = config_of(script("--load /w/ck/"), tmp_path)
    assert config.continues_save and not config.checkpoint.exit_on_missing_checkpoint
    found = read(script("--load /w/ck"), tmp_path)
    assert (
        "load: /w/ck  # --load, line 3: the folder of --save; its latest checkpoint, or new weights while" in found.text
    )
    assert found.remarks == ()


def test_a_checkpoint_that_must_be_there_is_not_said_to_be_optional(tmp_path: Path) -> None:
    found = read(script("--load /w/ck", "--exit-on-missing-checkpoint"), tmp_path)
    assert found.sections["checkpoint"]["exit_on_missing_checkpoint"] is True
    assert "load: /w/ck  # --load, line 3\n" in found.text


@pytest.mark.parametrize(
    ("flags", "folder", "cause"),
    [
        (["--load /w/ck", "--finetune"], "/w/ck-finetuned", "--finetune (line 4)"),
        (["--load /w/ck/", "--no-load-optim", "--no-load-rng"], "/w/ck-continued", "--no-load-optim (line 4)"),
        (["--no-load-rng", "--load /w/x/../ck"], "/w/ck-continued", "--no-load-rng (line 3)"),
    ],
)
def test_a_run_from_a_part_of_its_folder_saves_beside_it(
    flags: list[str], folder: str, cause: str, tmp_path: Path
) -> None:
    found = read(script(*flags), tmp_path)
    assert found.sections["checkpoint"]["save"] == folder
    assert [remark.partition(", because")[0] for remark in found.remarks] == [
        f"line 2: --save /w/ck: checkpoints go to {folder}"
    ]
    assert f"because {cause} takes only a part" in found.remarks[0]
    assert "# Differs from Megatron-LM:\n#   --save /w/ck (line 2): checkpoints go to" in found.text
    assert yaml.safe_load(found.text)["checkpoint"]["save"] == folder


@pytest.mark.parametrize("flags", [["--load /w/other", "--finetune"], ["--finetune"], ["--no-load-optim"]])
def test_other_folders_stay_as_they_are(flags: list[str], tmp_path: Path) -> None:
    found = read(script(*flags), tmp_path)
    assert found.sections["checkpoint"]["save"] == "/w/ck" and found.remarks == ()
