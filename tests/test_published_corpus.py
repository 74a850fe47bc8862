"""benchmarks.published_corpus counts outcomes and reasons of scripts, and answers their questions."""

import sys
from datetime import datetime
from pathlib import Path

import pytest

from benchmarks.published_corpus import __main__ as command
from benchmarks.published_corpus.outcomes import IMPORTED, REFUSED, Outcome, answers_to, outcome_of, tried
from benchmarks.published_corpus.small_config import small_config
from benchmarks.published_corpus.table import Row, answers_of, kind_of
from benchmarks.published_corpus.texts import Published, commits_of, model_configs_of, scripts_of
from benchmarks.published_corpus.trials import TRAINS, Trials
from llmctl.scripts.import_script import import_script
from tests.llmctl.scripts.test_model_config import FLAGS as MODEL_ARGS

NOW = datetime(2026, 1, 2, 3, 4, 5)
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 2"
    " --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
ASKS = f"""#!/bin/bash
# bash train.sh START
PROGRAM=pretrain_gpt.py
torchrun --nproc_per_node 1 $PROGRAM {FLAGS} --load $1 --lr-warmup-iters $WARMUP
"""
CONFIG = f"""ENV_VARS:
  NCCL_ALGO: Ring
{MODEL_ARGS}  --data-path: ${{DATA_PATH}}/text
  --save: ${{CHECKPOINT_SAVE_PATH}}
  --timing-log-level: 0
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    source = tmp_path / "corpus/owner+one"
    tests = source / "main/tests/test_cases"
    for name in ("gpt/small", "gpt/small_inference"):
        (tests / name).mkdir(parents=True)
    (source / "commits").write_text("main 0123456789abcdef0123456789abcdef01234567\n")
    (source / "main/asks.sh").write_text(ASKS)
    (source / "main/copy.sh").write_text(ASKS)
    (source / "main/plain.sh").write_text(f"torchrun --nproc_per_node 1 pretrain_gpt.py {FLAGS}\n")
    (source / "main/stops.sh").write_text(f"torchrun --nproc_per_node 1 pretrain_gpt.py {FLAGS} --no-such-flag 1\n")
    (source / "main/images.slurm").write_text("srun python pretrain_vision_classify.py --lr 1\n")
    (source / "main/comment.sh").write_text("# then start pretrain_gpt.py\n")
    (tests / "gpt/small/model_config.yaml").write_text(CONFIG)
    (tests / "gpt/small_inference/model_config.yaml").write_text(CONFIG.replace("0.0001", "0.0002"))
    return tmp_path / "corpus"


def test_distinct_scripts_that_start_a_program_are_found(corpus: Path) -> None:
    found = {one.path.name: one.is_known for one in scripts_of(corpus)}
    assert found == {"asks.sh": True, "plain.sh": True, "stops.sh": True, "images.slurm": False}
    assert [one.is_known for one in model_configs_of(corpus)] == [True, False]
    assert commits_of(corpus) == {"owner/one": ["main 0123456789abcdef0123456789abcdef01234567"]}


def test_questions_are_answered_by_their_names(corpus: Path) -> None:
    asked = outcome_of(corpus / "owner+one/main/asks.sh", NOW)
    assert (asked.kind, dict(asked.given).keys()) == (IMPORTED, {"1", "WARMUP"})
    assert outcome_of(corpus / "owner+one/main/plain.sh", NOW).given == ()
    stopped = outcome_of(corpus / "owner+one/main/stops.sh", NOW)
    assert stopped.kind == REFUSED and stopped.reason.startswith("--no-such-flag: ")
    assert kind_of(stopped.reason) == "flags"
    assert kind_of(outcome_of(corpus / "owner+one/main/images.slurm", NOW).reason) == "programs"


def test_flags_of_a_functional_test_are_a_training_line(corpus: Path) -> None:
    found = outcome_of(model_configs_of(corpus)[0].path, NOW)
    assert (found.kind, dict(found.given).keys()) == (IMPORTED, {"DATA_PATH"})


def test_an_imported_config_is_trained_at_a_small_size(corpus: Path, tmp_path: Path) -> None:
    script = corpus / "owner+one/main/plain.sh"
    data = "--data-path 1 /elsewhere/text --vocab-file v.json --merge-file m.txt --split 949,50,1 --load /start"
    script.write_text(script.read_text().replace("--mock-data --tokenizer-type NullTokenizer --vocab-size 100", data))
    sections = import_script(script, "plain.sh", {}, NOW).sections
    config = small_config(sections, tmp_path)
    assert config["data"]["data_path"][1].startswith(str(tmp_path)) and config["model"]["hidden_size"] == 64
    trials = Trials(tmp_path)
    assert tried(outcome_of(script, NOW), script, NOW, trials).trial == TRAINS
    assert trials.outcome_of(sections) == TRAINS and trials.trained == 1
    layout = {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 2}
    assert small_config({**sections, "parallel": layout}, tmp_path)["parallel"] == {}
    ids = {**sections, "data": {"data_path": ["/elsewhere/ids"], "tokenizer_type": "NullTokenizer"}}
    assert trials.outcome_of({**ids, "checkpoint": {}}) == TRAINS
    assert "no_such_module" in trials.outcome_of({**sections, "hooks": {"loss_function": "no_such_module:loss"}})


def test_the_page_has_counts_and_no_text_of_a_script(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = corpus.parent / "page.md"
    monkeypatch.setattr(sys, "argv", ["published_corpus", str(corpus), "--to", str(page)])
    command.main()
    text = page.read_text()
    assert "| owner/one | 3 | 1 | 0 | 1 | 2 | 0 | 1 | 0 | 0 |" in text
    assert "- owner/one: main 0123456789" in text and "torchrun" not in text


def test_arguments_of_a_script_are_one_answer() -> None:
    assert answers_of(Outcome(IMPORTED)) == 0
    assert answers_of(Outcome(IMPORTED, given=(("1", "a"), ("12", "b")))) == 1
    assert answers_of(Outcome(IMPORTED, given=(("1", "a"), ("DATA", "b"), ("LR", "1")))) == 3


def test_an_interval_is_a_number_and_a_group_of_a_blend_a_group() -> None:
    assert answers_to("save_interval", "--save-interval: $save_interval is not set")[0] == "1"
    question = "--train-weighted-split-paths: $TRAIN is not set"
    assert answers_to("TRAIN", question) == ('"TRAIN: 1 0:1 /data/train"',)


def test_a_word_that_an_answer_adds_to_a_flag_is_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"torchrun pretrain_gpt.py {FLAGS} --seed $1 ${{2:+--lr $2}} ${{3:+$3}}")
    found = outcome_of(path, NOW)
    assert (found.kind, dict(found.given).get("3", "")) == (IMPORTED, "")


def test_a_choice_and_the_other_questions_are_answered_in_one_round(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        f"for N in 7 8; do torchrun pretrain_gpt.py {FLAGS} --seed $N --weight-decay $MIN --fp8-format e4m3; done"
    )
    found = outcome_of(path, NOW)
    assert (found.kind, found.rounds, dict(found.given)) == (IMPORTED, 1, {"N": "7", "fp8": "bf16", "MIN": "1"})


def test_arguments_that_a_script_counts_are_all_given(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    ends = "if [ -z $2 ]; then exit 1; fi"
    path.write_text(f"{ends}\ntorchrun pretrain_gpt.py {FLAGS} --seed $1 --weight-decay $3")
    assert outcome_of(path, NOW).kind == IMPORTED
    path.write_text(f"torchrun pretrain_gpt.py {FLAGS} --micro-batch-size $(($1 / 128)) --log-interval $2")
    assert outcome_of(path, NOW).given == (("1", "1024"), ("2", "1"))


def test_parameters_whose_template_is_published_are_put_in_place(tmp_path: Path) -> None:
    path = tmp_path / "train/train.sh"
    for name in ("train", "task_template"):
        (tmp_path / name).mkdir()
    (tmp_path / "task_template/params.sh").write_text(f"PARAMS='{FLAGS}'")
    path.write_text("source $ROOT/tasks/$TASK/params.sh\ntorchrun pretrain_gpt.py ${PARAMS:-} --seed 1\n")
    found = outcome_of(path, NOW, tmp_path / "made")
    assert (found.kind, found.rounds, found.files, answers_of(found)) == (IMPORTED, 1, 1, 3)
    (tmp_path / "task_template/params.sh").unlink()
    assert outcome_of(path, NOW, tmp_path / "other").kind == REFUSED


def test_a_variable_of_a_condition_has_the_value_that_it_is_compared_with(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    sizes = 'if [ "$HOSTNAME" = big ]; then N=7; elif [ "$HOSTNAME" == small ]; then N=8; else exit 1; fi'
    path.write_text(f"{sizes}\ntorchrun pretrain_gpt.py {FLAGS} --seed $N")
    found = outcome_of(path, NOW)
    assert (found.kind, found.given) == (IMPORTED, (("HOSTNAME", "big"),))


@pytest.mark.parametrize(
    ("name", "question", "answer"),
    [
        ("TOKENS", "--train-tokens: $TOKENS is not set", "1000000000000"),
        ("2", "--train-tokens: the script's argument $2 is not set", "100000000"),
        ("1", "--lr-decay-iters: the script's argument $1 is not set", "10000000"),
        ("WARMUP_ITERS", "--lr-warmup-iters: $WARMUP_ITERS is not set", "1"),
        ("TOKENIZER", "--tokenizer-model: $TOKENIZER is not set", "/data/tokenizer"),
    ],
)
def test_lengths_are_large_and_warmup_is_short(name: str, question: str, answer: str) -> None:
    assert answers_to(name, question)[0] == answer


def test_files_of_groups_are_made_up_and_count_as_answers(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    files = "--train-weighted-split-paths-path $ROOT/train.txt --valid-weighted-split-paths-path $ROOT/valid.txt"
    path.write_text(f"torchrun pretrain_gpt.py {FLAGS}".replace("--mock-data", files))
    found = outcome_of(path, NOW, tmp_path / "made")
    assert (found.kind, found.rounds, found.files, answers_of(found)) == (IMPORTED, 1, 2, 3)
    assert outcome_of(path, NOW).kind == REFUSED
    path.write_text(path.read_text().replace("$ROOT", "/elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    assert outcome_of(path, NOW, tmp_path / "made").kind == REFUSED


def test_a_script_that_only_converts_is_none_of_the_programs(tmp_path: Path) -> None:
    path, script = tmp_path / "convert.sh", Published("o/n", tmp_path, frozenset({"pretrain_gpt"}))
    path.write_text(f"torchrun pretrain_gpt.py {FLAGS} --ckpt-convert-format torch --ckpt-convert-save out")
    assert not Row(script, outcome_of(path, NOW)).is_known
    path.write_text(path.read_text() + " --no-such-flag")
    assert Row(script, outcome_of(path, NOW)).is_known
