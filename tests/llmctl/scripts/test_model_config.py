"""A ``model_config.yaml`` of Megatron-LM's functional tests, read as the training line that its runner makes of it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.errors import UsageError
from llmctl.scripts.import_script import ImportedScript, import_script, launch_line_of
from llmctl.scripts.shell.values import text_of

NOW = datetime(2026, 1, 2, 3, 4, 5)
HEAD = """ENV_VARS:
  NCCL_ALGO: Ring  # fixed
  HF_TOKEN: ${SECRET}
TEST_TYPE: regular
"""
FLAGS = """MODEL_ARGS:
  --num-layers: 2
  --hidden-size: 32
  --num-attention-heads: 4

  # the size of a step
  --seq-length: 16
  --micro-batch-size: 1
  --global-batch-size: 2
  --train-iters: 10
  --lr: 0.00010
  --tokenizer-type: NullTokenizer
  --vocab-size: 100
"""


def write(folder: Path, text: str, model: str = "gpt") -> Path:
    path = folder / model / "small/model_config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read(folder: Path, text: str, model: str = "gpt", **given: str) -> ImportedScript:
    return import_script(write(folder, text, model), "model_config.yaml", given, NOW)


def words(folder: Path, entries: str, **given: str) -> list[str]:
    """The words that the program gets for further entries of MODEL_ARGS."""
    launch = launch_line_of(write(folder, FLAGS + entries), given, NOW)
    texts = [text_of(value) for value in launch.arguments]
    return texts[texts.index("100") + 1 :]


def refusal(folder: Path, text: str, model: str = "gpt", **given: str) -> list[str]:
    with pytest.raises(UsageError) as error:
        read(folder, text, model, **given)
    return error.value.message.split("\n")


def test_flags_and_variables_keep_their_lines(tmp_path: Path) -> None:
    text = read(tmp_path, f"{HEAD}{FLAGS}  --mock-data: true\n").text
    assert "# From model_config.yaml by llmctl import-script: torchrun pretrain_gpt.py, line 5." in text
    assert "  hidden_size: 32  # --hidden-size, line 7\n" in text
    assert "  seq_length: 16  # --seq-length, line 11\n" in text
    assert "    NCCL_ALGO: Ring  # export NCCL_ALGO, line 2\n" in text
    assert "lr: 0.00010  # --lr, line 15" in text and "mock_data: true  # --mock-data, line 18" in text


def test_variables_after_the_flags_are_set_too(tmp_path: Path) -> None:
    assert read(tmp_path, f"{FLAGS}  --mock-data: true\n{HEAD}").sections["job"]["env"] == {"NCCL_ALGO": "Ring"}


def test_all_that_the_runner_sets_is_asked_for_at_once(tmp_path: Path) -> None:
    entries = "  --data-path: ${DATA_PATH}/text\n  --save: ${SAVE_PATH}/a\n  --load: ${LOAD_PATH}\n"
    assert sorted(refusal(tmp_path, FLAGS + entries), key=lambda line: line.partition("line ")[2]) == [
        "model_config.yaml, line 14: --data-path: $DATA_PATH is not set; give the value with --arg DATA_PATH=VALUE",
        "also: line 15: --save: $SAVE_PATH is not set; give the value with --arg SAVE_PATH=VALUE",
        "also: line 16: --load: $LOAD_PATH is not set; give the value with --arg LOAD_PATH=VALUE",
    ]
    found = read(tmp_path, FLAGS + entries, DATA_PATH="/d", SAVE_PATH="/s", LOAD_PATH="/l").sections
    assert (found["data"]["data_path"], found["checkpoint"]["save"]) == (["/d/text"], "/s/a")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("--swiglu: true", ["--swiglu"]),
        ("--swiglu: false", []),
        ("--swiglu: 'true'", ["--swiglu"]),
        ("--moe-layer-freq: ([0]*3+[1]*11)", ["--moe-layer-freq", "([0]*3+[1]*11)"]),
        ("--recompute-modules: '[core_attn mlp]'", ["--recompute-modules", "core_attn", "mlp"]),
        ("--recompute-modules: [core_attn, mlp]", ["--recompute-modules", "core_attn", "mlp"]),
        (
            "--pipeline-model-parallel-layout: Et*2|(tt|)*5t|tmL",
            ["--pipeline-model-parallel-layout", "Et*2|(tt|)*5t|tmL"],
        ),
        ("--wandb-exp-name: two words", ["--wandb-exp-name", "two words"]),
        ("--wandb-exp-name: '\"a\" `b` \\c'", ["--wandb-exp-name", '"a" `b` \\c']),
        ("--data-path: $BLEND", ["--data-path", "0.5", "a", "0.5", "b"]),
        ("--lr: 1e-5", ["--lr", "1e-5"]),
        ("--wandb-exp-name: ''", []),
    ],
)
def test_values_become_the_words_of_the_runner(tmp_path: Path, entry: str, expected: list[str]) -> None:
    given = {"BLEND": "0.5 a 0.5 b"} if "$BLEND" in entry else {}
    assert words(tmp_path, f"  {entry}\n", **given) == expected


def test_anchors_and_merges_are_followed(tmp_path: Path) -> None:
    text = FLAGS.replace("MODEL_ARGS:", "BASE_MODEL_ARGS: &base") + (
        "MODEL_ARGS:\n  <<: *base\n  --mock-data: true\n  --train-iters: 20\n"
    )
    assert read(tmp_path, text).sections["training"]["train_iters"] == 20


def test_merges_that_double_end_at_once(tmp_path: Path) -> None:
    doubled = "".join(f"a{level}: &a{level} {{<<: [*a{level - 1}, *a{level - 1}]}}\n" for level in range(1, 60))
    text = "a0: &a0 {--mock-data: true}\n" + doubled + FLAGS + "  <<: *a59\n"
    assert read(tmp_path, text).sections["data"]["mock_data"] is True


def test_the_program_is_that_of_the_folder_or_is_asked_for(tmp_path: Path) -> None:
    text = f"{FLAGS}  --mock-data: true\n"
    assert refusal(tmp_path, text, "mine") == [
        "model_config.yaml, line 1: the file names no program; give it with --arg TRAINING_SCRIPT_PATH=pretrain_gpt.py"
    ]
    named = read(tmp_path, text, "mine", TRAINING_SCRIPT_PATH="/m/pretrain_gpt.py")
    assert named.sections == read(tmp_path, text).sections
    assert refusal(tmp_path, text, "hybrid")[0].startswith("model_config.yaml, line 1: pretrain_hybrid.py ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model: {num_layers: 2}\n",
            "model_config.yaml: is neither a shell script nor a model_config.yaml of Megatron-LM",
        ),
        ("- a\n", "model_config.yaml: is neither a shell script"),
        ("a: [1\nb: 2\n", "model_config.yaml, line 2: is not valid YAML: "),
        ("a: *b\n", "model_config.yaml, line 1: is not valid YAML: found undefined alias"),
        ("MODEL_ARGS: 7\n", "model_config.yaml, line 1: MODEL_ARGS: is not a mapping of names to values"),
        ("MODE: inference\nMODEL_ARGS: {--lr: 1}\n", "model_config.yaml, line 1: MODE: inference trains nothing"),
        (
            "MODEL_ARGS:\n  trainer.max_steps: 2\n",
            "model_config.yaml, line 2: MODEL_ARGS, trainer.max_steps: is not a flag",
        ),
        ("? [a]\n: 1\nMODEL_ARGS: {? [b] : 1}\n", "model_config.yaml, line 3: MODEL_ARGS, ["),
        ("a: 1\nMODEL_ARGS:\n  <<: 7\n", "model_config.yaml, line 3: <<: merges something that is not a mapping"),
        ("MODEL_ARGS: &a\n  <<: *a\n", "model_config.yaml: its commands are nested too deeply"),
        ("MODEL_ARGS:\n  --lr:\n", "model_config.yaml, line 2: --lr: has no value; a flag alone has the value true"),
        ("MODEL_ARGS:\n  --lr: {a: 1}\n", "model_config.yaml, line 2: --lr: is a mapping, which no flag takes"),
        ("MODEL_ARGS:\n  --lr: [[1]]\n", "model_config.yaml, line 2: --lr: is a list of lists, which no flag takes"),
        ("ENV_VARS: {a b: 1}\nMODEL_ARGS: {--lr: 1}\n", "model_config.yaml, line 1: ENV_VARS, a b: is not a variable"),
        ("MODEL_ARGS: {--lr: $(rm -rf /)}\n", "model_config.yaml, line 1: --lr: $(rm -rf /) is never executed"),
    ],
)
def test_a_file_that_is_none_is_refused_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    assert refusal(tmp_path, text)[0].startswith(expected)


def test_commands_before_the_program_are_listed(tmp_path: Path) -> None:
    text = f"BEFORE_SCRIPT: |\n  pip uninstall -y apex\n{FLAGS}  --mock-data: true\n"
    assert (
        "#   source BEFORE_SCRIPT (line 1): the cluster's profile sets the environment up" in read(tmp_path, text).text
    )


@pytest.mark.usefixtures("own_folders")
def test_it_is_submitted_as_a_script_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path, f"{FLAGS}  --mock-data: true\n"))
    for words in (["submit", path], ["import-script", path, "--run"]):
        assert main([*words, "--cluster", "local", "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["cluster"] == "local"
