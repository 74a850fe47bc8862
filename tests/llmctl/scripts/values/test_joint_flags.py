"""Flags of a script whose meaning follows from several of them: the comments that name them, and the questions."""

from pathlib import Path

import pytest

from llmctl.errors import UsageError
from tests.llmctl.scripts.test_import_script import TRAIN, config_of, read

GPT_OSS = """--quick-geglu \\
 --glu-linear-offset 1.0 \\
 --activation-func-clamp-value 7.0 --softmax-type learnable --window-size 127,0 --enable-gpt-oss \\
 --rope-type rope --position-embedding-type rope \\
 --window-attn-skip-freq 2 --init-model-with-meta-device"""


def test_the_layers_of_gpt_oss_with_the_lines_of_their_flags(tmp_path: Path) -> None:
    model = config_of(f"{TRAIN} {GPT_OSS}", tmp_path).model
    assert (model.activation, model.activation_alpha, model.activation_clamp) == ("silu", 1.702, 7.0)
    assert model.attention_sinks and [model.window_of(layer) for layer in range(2)] == [128, None]
    text = read(f"{TRAIN} {GPT_OSS}", tmp_path).text
    assert "activation_func: silu  # --quick-geglu, line 1" in text
    assert "window_layers: [true, false]  # --window-attn-skip-freq, line 5" in text
    idle = text[text.index("# Flags without effect here:") :]
    told = [flag for flag in ("rope-type", "enable-gpt-oss", "init-model-with-meta-device") if f"--{flag}" in idle]
    assert len(told) == 3
    assert not any(f"--{flag}" in idle for flag in ("quick-geglu", "glu-linear-offset", "window-attn"))


def test_yarn_keeps_the_lines_of_its_flags(tmp_path: Path) -> None:
    flags = "--position-embedding-type yarn \\\n --rotary-scaling-factor 32 --mscale 1.0"
    text = read(f"{TRAIN} {flags}", tmp_path).text
    assert "rope_type: yarn}  # --rotary-scaling-factor, line 2, --mscale, line 2" in text


def test_a_flag_that_is_refused_beside_others_is_named_with_its_line(tmp_path: Path) -> None:
    flags = "--swiglu \\\n --glu-linear-offset 1.0 \\\n --quick-geglu"
    with pytest.raises(UsageError, match="line 3: --quick-geglu: cannot be combined with --swiglu"):
        read(f"{TRAIN} {flags}", tmp_path)


@pytest.mark.parametrize("flag", ["--train-samples", "--glu-linear-offset", "--profile-step-end", "--lr-decay-samples"])
def test_a_value_that_only_others_give_a_meaning_is_asked_for(flag: str, tmp_path: Path) -> None:
    script = f"{TRAIN.replace('--train-iters 10', '')} --global-batch-size 2 {flag} $NUMBER"
    with pytest.raises(UsageError, match=rf"{flag}: \$NUMBER is not set; .*--arg NUMBER=VALUE"):
        read(script, tmp_path)


def test_groups_of_a_blend_in_a_file(tmp_path: Path) -> None:
    flags = "--train-weighted-split-paths-path train.txt --valid-weighted-split-paths-path $FOLDER/valid.txt"
    script = f"{TRAIN.replace('--mock-data', flags)}"
    with pytest.raises(UsageError, match=r"--valid-weighted-split-paths-path: \$FOLDER is not set"):
        read(script, tmp_path)
    with pytest.raises(UsageError, match=r"reads train.txt, which is not beside the script"):
        read(script, tmp_path, FOLDER=str(tmp_path))
    elsewhere = script.replace("train.txt", "/absent/train.txt")
    with pytest.raises(UsageError, match=r"reads /absent/train.txt, which is not on this machine; put it there, give"):
        read(elsewhere, tmp_path, FOLDER=str(tmp_path))
    (tmp_path / "train.txt").write_text('"train: 0.5 0:0.9 a, 0.5 0:0.9 b"\n')
    (tmp_path / "valid.txt").write_text('"one: 0.5 0.9:1 a, 0.5 0.9:1 b"\n')
    data = config_of(script, tmp_path, FOLDER=str(tmp_path)).data
    assert (data.data_path, data.split) == (["0.5", "a", "0.5", "b"], "0.9,0.1,0")
    (tmp_path / "valid.txt").write_text('"one: 0.5 0.9:1 a" "two: 0.5 0.9:1 b"\n')
    with pytest.raises(UsageError, match="--valid-weighted-split-paths: takes one group"):
        read(script, tmp_path, FOLDER=str(tmp_path))
