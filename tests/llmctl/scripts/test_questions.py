"""Values that only the user can give: all are asked for at once, and a value that no script asks for is refused."""

from datetime import datetime
from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.errors import UsageError
from llmctl.scripts.import_script import ImportedScript, flags_of, import_script

NOW = datetime(2026, 1, 2, 3, 4, 5)
FLAGS = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 16 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
)
LAUNCH = f"torchrun --nproc_per_node 1 {FLAGS}"
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


def read(folder: Path, text: str, given: dict[str, str] | None = None) -> ImportedScript:
    path = folder / "train.sh"
    path.write_text(text)
    return import_script(path, "train.sh", given or {}, NOW)


def test_all_values_that_flags_need_are_asked_for_at_once(tmp_path: Path) -> None:
    text = f"""# Usage: train.sh LR
OUT=out/$(whoami)
{LAUNCH} --lr $1 --min-lr $MIN \\
  --save out --load $OUT --seed $SEED --tensorboard-dir $NOWHERE"""
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert error.value.message.split("\n") == [
        "train.sh, line 3: --lr: the script's argument $1 is not set; give the value with --arg 1=VALUE",
        "also: line 3: --min-lr: $MIN is not set; give the value with --arg MIN=VALUE",
        "also: line 2: --load: $(whoami) is never executed; give the value with --arg OUT=VALUE",
        "also: line 4: --seed: $SEED is not set; give the value with --arg SEED=VALUE",
        "the script says: Usage: train.sh LR",
    ]
    found = read(tmp_path, text, {"1": "1e-4", "MIN": "1e-5", "OUT": "o", "SEED": "7"})
    assert found.sections["checkpoint"] == {"save": "out", "load": "o"}


@pytest.mark.parametrize(
    ("launch", "name"),
    [
        ("torchrun $MORE --nproc_per_node 1", "MORE"),
        ("torchrun --nproc_per_node 1 $MORE", "MORE"),
        ("$LAUNCHER", "LAUNCHER"),
        ("srun -n 1 $RUN python", "RUN"),
    ],
)
def test_words_of_the_launcher_and_of_no_flag_are_asked_for_with_the_others(
    launch: str, name: str, tmp_path: Path
) -> None:
    text = f"{launch} {FLAGS} --lr $LR --bf16 $EXTRA_ARGS"
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    out = "to leave it out, as bash does"
    assert error.value.message.split("\n") == [
        f"train.sh, line 1: ${name} is not set; give the value with --arg {name}=VALUE, or --arg {name}= {out}",
        "also: line 1: --lr: $LR is not set; give the value with --arg LR=VALUE",
        f"also: line 1: $EXTRA_ARGS is not set; give the value with --arg EXTRA_ARGS=VALUE, or --arg EXTRA_ARGS= {out}",
    ]
    known = {"LR": "1e-4", "EXTRA_ARGS": "--swiglu"}
    found = read(tmp_path, text, {**known, name: "torchrun" if name == "LAUNCHER" else ""})
    assert found.sections["model"]["swiglu"] is True and found.sections["optimizer"]["lr"] == 1e-4


def test_an_unknown_image_is_no_word_to_leave_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, f"singularity exec $IMAGE python {FLAGS} --lr 1")
    assert error.value.message == "train.sh, line 1: $IMAGE is not set; give the value with --arg IMAGE=VALUE"


def test_a_place_for_checkpoints_that_nobody_knows_is_the_run_directory(tmp_path: Path) -> None:
    text = f"CK=$WORK/ck\n{LAUNCH} --lr 1 --save $CK --load $CK --data-cache-path $WORK/cache"
    found = read(tmp_path, text)
    assert not found.sections.keys() & {"checkpoint"} and "data_cache_path" not in found.sections["data"]
    reason = "$WORK is not set, so checkpoints go to the run directory; give --arg WORK=VALUE for another place"
    assert found.remarks == (f"line 2: --save: {reason}",)
    assert "--load (line 2): the folder of --save, which is not known here" in found.text
    assert read(tmp_path, text, {"WORK": "w"}).sections["checkpoint"] == {"save": "w/ck", "load": "w/ck"}


@pytest.mark.parametrize("start", ["--save $CK --load $CK --finetune", "--save $CK --load $START", "--load $CK"])
def test_a_start_that_nobody_knows_is_asked_for(start: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--(load|save): .* is not set; give the value with --arg"):
        read(tmp_path, f"{LAUNCH} {start}")


def test_a_condition_is_asked_for_by_the_variable_that_decides_it(tmp_path: Path) -> None:
    text = f"""if [ "$HOSTNAME" = big ]; then LR=1e-4; SEED=1; TAG=$HOSTNAME; else LR=2e-4; SEED=2; fi
{LAUNCH} --lr $LR --seed $SEED --wandb-exp-name $TAG"""
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    reason = "$LR depends on a condition on $HOSTNAME in line 1 that only the job knows"
    assert error.value.message == f"train.sh, line 1: --lr: {reason}; give the value with --arg HOSTNAME=VALUE"
    assert read(tmp_path, text, {"HOSTNAME": "big"}).sections["training"]["seed"] == 1
    assert read(tmp_path, text, {"HOSTNAME": "other"}).sections["training"]["seed"] == 2


def test_all_refused_flags_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, f"{LAUNCH} --nmu-layers 2 \\\n --kd \\\n --lr 1 2 --seed 1")
    first, *others = error.value.message.split("\n")
    assert first.startswith("train.sh, line 1: --nmu-layers: unknown flag; did you mean")
    assert [one.partition(": takes")[0].partition(": is")[0] for one in others] == [
        "also: line 2: --kd",
        "also: line 3: --lr",
    ]


def test_an_unquoted_test_of_several_words_fails_as_in_bash(tmp_path: Path) -> None:
    text = f"WORDS='a b'; LR=1\nif [ -z $WORDS ]; then LR=2; fi\n{LAUNCH} --lr $LR"
    assert read(tmp_path, text).sections["optimizer"]["lr"] == 1


def test_one_question_stays_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, f"# usage: LR=1 train.sh\n{LAUNCH} --lr $LR --min-lr $LR")
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LRR", "train.sh: --arg LRR: the script neither uses nor sets LRR; did you mean LR?"),
        ("lr", "train.sh: --arg lr: the script neither uses nor sets lr; did you mean LR?"),
        (
            "num-layers",
            "train.sh: --arg num-layers: the script has a value for --num-layers; change it there, or give its key to "
            "submit with --set",
        ),
        ("OTHER", "train.sh: --arg OTHER: the script neither uses nor sets OTHER; it has LR, SIZE: leave it out"),
        ("1", "train.sh: --arg 1: the script uses no arguments, not $1 or $@; leave it out"),
        ("fp8", "train.sh: --arg fp8: the script neither uses nor sets fp8; it has LR, SIZE: leave it out"),
    ],
)
def test_a_value_that_nothing_asks_for_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, f"SIZE=7\n{LAUNCH} --lr ${{LR:-1e-4}} --seed $SIZE", {name: "9"})
    assert error.value.message == message


def test_a_wrong_name_is_told_before_the_question_for_the_right_one(tmp_path: Path) -> None:
    text = f"if [ -z $LR ]; then exit 1; fi\n{LAUNCH} --lr $LR"
    with pytest.raises(UsageError, match="did you mean LR"):
        read(tmp_path, text, {"LRR": "9"})


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("LR=1e-4", {"LR": "9e-9"}),
        ("LR=1e-4; LR=2e-4", {"LR": "9e-9"}),
        ("export LR=1e-4", {"LR": "9e-9"}),
        ("read LR <<< 1", {"LR": "9e-9"}),
        ("source ./params.sh", {"LR": "9e-9"}),
        ("LR=$1", {"1": "9e-9"}),
        ("while [ $# -gt 0 ]; do case $1 in --lr) LR=$2;; esac; shift 2; done", {"1": "--lr", "2": "9e-9"}),
        ("set -u; WORDS=($@); LR=${WORDS[1]}", {"1": "x", "2": "9e-9"}),
        ("KIND=a; NAME=LR_$KIND; LR=${!NAME}", {"LR_a": "9e-9"}),
    ],
)
def test_a_value_that_the_script_sets_or_uses_is_taken(text: str, given: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "params.sh").write_text("LR=3\n")
    assert read(tmp_path, f"{text}\n{LAUNCH} --lr $LR", given).sections["optimizer"]["lr"] == 9e-9


def test_a_file_that_the_script_reads_may_use_a_value(tmp_path: Path) -> None:
    (tmp_path / "params.sh").write_text('[ -n "$DEBUG" ] && set -x\n')
    assert read(tmp_path, f"source ./params.sh\n{LAUNCH} --lr 1", {"DEBUG": "1"}).sections["optimizer"]["lr"] == 1


def test_words_after_two_dashes_are_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.sh").write_text(
        f"while [ $# -gt 0 ]; do case $1 in --lr) LR=$2;; esac; shift 2; done\n{LAUNCH} --lr $LR"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["import-script", "train.sh", "--", "--lr", "9e-9"]) == 0
    assert "lr: 9.0e-09  # --lr" in capsys.readouterr().out
    assert main(["import-script", "train.sh", "--arg", "2=1", "--", "--lr", "9e-9"]) == 2
    assert "--arg 2: -- gives the script's arguments already" in capsys.readouterr().err


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


def test_a_flag_that_needs_another_is_left_out_as_in_megatron(tmp_path: Path) -> None:
    text = f"{LAUNCH} --lr 1 --loss-scale 12 --rope-scaling-factor 8 --bf16"
    found = read(tmp_path, text)
    assert "loss_scale" not in found.sections["training"] and "rope_scaling" not in found.sections["model"]
    assert "--loss-scale 12 (line 1): only the gradients of --fp16 are scaled" in found.text
    kept = read(tmp_path, f"{LAUNCH} --lr 1 --loss-scale 12 --fp16")
    assert kept.sections["training"]["loss_scale"] == 12


TWICE = f"{LAUNCH} --lr 1 --save a\n{LAUNCH} --lr 2 --save a --load a"


def test_a_user_chooses_between_training_lines(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"line 1: a training program starts here and in line 2; .*training_line=1 tr"):
        read(tmp_path, TWICE)
    assert read(tmp_path, TWICE, {"training_line": "1"}).sections["optimizer"]["lr"] == 1
    assert read(tmp_path, TWICE, {"training_line": "2"}).sections["optimizer"]["lr"] == 2
    with pytest.raises(UsageError, match="no training program starts in line 3; use 1 or 2"):
        read(tmp_path, TWICE, {"training_line": "3"})
    with pytest.raises(UsageError, match="--arg training_line: the script has one training line"):
        read(tmp_path, f"{LAUNCH} --lr 1", {"training_line": "1"})


def test_a_user_chooses_a_round_of_a_loop(tmp_path: Path) -> None:
    text = f"for size in 1 2; do for LR in 3 4; do {LAUNCH} --lr $LR --seed $size; done; done"
    with pytest.raises(UsageError, match="in a loop over size and LR; a config has one: give one round with --arg LR="):
        read(tmp_path, text)
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert error.value.message.endswith(
        "\nalso: line 1: a training program starts here, in a loop over size; a config has one: "
        "give one round with --arg size=VALUE, such as 1"
    )
    found = read(tmp_path, text, {"LR": "4", "size": "2"})
    assert (found.sections["optimizer"]["lr"], found.sections["training"]["seed"]) == (4, 2)


CHOSEN = "source ./params/$MODEL.sh\n"


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (f"{LAUNCH} --lr $1 --min-lr $MIN\n{LAUNCH} --lr 2", "line 1: a training program starts here and in line 2; "),
        (
            f"for N in 7 8; do {LAUNCH} --seed $N --lr $1 --min-lr $MIN; done",
            "line 1: a training program starts here, ",
        ),
        (
            f"{LAUNCH} --lr $1 --min-lr $MIN --fp8-format hybrid",
            "line 1: --fp8-format: fp8 training is not supported; ",
        ),
        (f"{CHOSEN}{LAUNCH} --lr $1 --min-lr $MIN $ONE", "line 1: $MODEL is not set; "),
        (
            f'X="--seed 1"; [ "$HOSTNAME" = a ] && X="--seed 2"\n{LAUNCH} --lr $1 --min-lr $MIN'.replace(
                ".py", ".py $X"
            ),
            "line 1: $X depends on a condition on $HOSTNAME in line 1 ",
        ),
    ],
)
def test_a_choice_is_asked_for_with_what_the_script_needs_besides(text: str, first: str, tmp_path: Path) -> None:
    (tmp_path / "params").mkdir()
    (tmp_path / "params/small.sh").write_text("ONE='--seed $OWN'")
    (tmp_path / "params/large.sh").write_text("ONE='--seed 1'")
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    chosen, *others = error.value.message.split("\n")
    assert chosen.startswith(f"train.sh, {first}")
    # What only one of the files asks for is not certain to be needed.
    assert [one.partition("--arg ")[2] for one in others] == ["1=VALUE", "MIN=VALUE"]


def test_a_file_without_which_the_model_is_unknown_is_named(tmp_path: Path) -> None:
    text = "source /etc/modules.sh\nsource $DIR/params.sh\ntorchrun pretrain_gpt.py --lr 1 $PARAMS_X --mock-data"
    script = text.replace("$PARAMS_X", "")
    with pytest.raises(UsageError, match=r"line 2: reads \$DIR/params.sh: \$DIR is not set; .* --arg DIR=VALUE"):
        read(tmp_path, script)
    with pytest.raises(
        UsageError, match=r"line 2: reads /a/params.sh, which is not beside the script: the flags of mod"
    ):
        read(tmp_path, script, {"DIR": "/a"})


def test_bf16_instead_of_fp8_takes_all_flags_about_fp8(tmp_path: Path) -> None:
    text = f"{LAUNCH} --lr 1 --fp8-recipe tensorwise --fp8-format hybrid --first-last-layers-bf16 --fp8-param-gather"
    with pytest.raises(UsageError, match="--fp8-format: .* --arg fp8=bf16 trains this script in bf16"):
        read(tmp_path, text)
    found = read(tmp_path, text, {"fp8": "bf16"})
    assert found.sections["training"]["bf16"] is True
    assert "--fp8-recipe tensorwise (line 1): trained in bf16" in found.text
    with pytest.raises(UsageError, match="--fp8-recipe: other low precisions"):
        read(tmp_path, f"{LAUNCH} --lr 1 --fp8-recipe tensorwise")


def test_the_base_width_of_mup_is_asked_for(tmp_path: Path) -> None:
    text = f"{LAUNCH} --lr $1 --mup --mup-input-mult 10 --mup-output-mult 2"
    with pytest.raises(UsageError, match="--lr: .* --arg 1=VALUE\nalso: line 1: --mup: .*mup-base-hidden-size=VALUE$"):
        read(tmp_path, text)
    found = read(tmp_path, text, {"1": "0.1", "mup-base-hidden-size": "8"})
    model = found.sections["model"]
    assert (model["mup_base_hidden_size"], model["embedding_scale"], model["logits_scaling"]) == (8, 10, 2)
    assert any("Adam's epsilon falls with the width" in remark for remark in found.remarks)
    with pytest.raises(UsageError, match="--mup-base-hidden-size: '-8' is not valid"):
        read(tmp_path, text, {"1": "0.1", "mup-base-hidden-size": "-8"})
    for others in (f"{LAUNCH} --lr $1", f"{LAUNCH} --lr $1 --use-mup"):
        with pytest.raises(UsageError, match="--arg mup-base-hidden-size: the script neither uses nor sets"):
            read(tmp_path, others, {"1": "0.1", "mup-base-hidden-size": "8"})


@pytest.mark.parametrize(
    ("program", "flags", "kept"),
    [
        ("gpt", "--attention-backend flash --attention-dropout 0.0", "flash"),
        ("gpt", "--attention-backend flash", None),
        ("gpt", "--attention-backend unfused", "unfused"),
        ("bert", "--attention-backend flash --attention-dropout 0", None),
        ("t5", "--attention-backend unfused --decoder-seq-length 8", None),
    ],
)
def test_kernels_that_do_not_fit_are_left_to_the_trainer(program: str, flags: str, kept: str, tmp_path: Path) -> None:
    text = f"{LAUNCH} --lr 1 {flags}".replace("pretrain_gpt", f"pretrain_{program}")
    found = read(tmp_path, text)
    assert found.sections["model"].get("attention_backend") == kept
    assert ("--attention-backend" in found.text.partition("without effect")[2]) == (kept is None)
