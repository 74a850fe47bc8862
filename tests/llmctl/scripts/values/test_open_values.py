"""Values that a script leaves open: places in quotes, files of unknown folders, and values that the user gave."""

from pathlib import Path

import pytest

from llmctl.errors import UsageError
from tests.llmctl.scripts.test_import_script import FLAGS, TRAIN, config_of, read


@pytest.mark.parametrize("value", ["<PATH TO THE DATA>", "<path to the data>/part_text_document", "<your_data>"])
def test_a_place_in_quotes_is_asked_for_by_the_name_of_its_variable(value: str, tmp_path: Path) -> None:
    script = f'DATA="{value}"\nALL="0.3 ${{DATA}} 0.7 b"\n{TRAIN.replace("--mock-data", "--data-path $ALL")}'
    with pytest.raises(
        UsageError, match=r"line 1: --data-path: <.*> is a place .*; give the value with --arg DATA=VAL"
    ):
        read(script, tmp_path)
    assert config_of(script, tmp_path, DATA="a").data.data_path == ["0.3", "a", "0.7", "b"]


def test_a_token_of_a_vocabulary_is_no_open_place(tmp_path: Path) -> None:
    script = f'END="<eod>"\n{TRAIN} --tokenizer-special-tokens $END'
    assert config_of(script, tmp_path).data.tokenizer_special_tokens == ["<eod>"]


@pytest.mark.parametrize(
    "written",
    [
        f'OPTIONS="--vocab-file <PATH TO vocab.json> --split 1,0,0"\nsh -c "{TRAIN} $OPTIONS"',
        f'OPTIONS="--vocab-file <PATH TO vocab.json> --split 1,0,0"\n{TRAIN} $OPTIONS',
        f'\n{TRAIN} --vocab-file "<PATH TO vocab.json>" --split 1,0,0',
        f"\n{TRAIN} --vocab-file=<your_vocab> --split 1,0,0",
        f'OPTIONS="--vocab-file $(find . -name vocab.json) --split 1,0,0"\n{TRAIN} $OPTIONS',
        f"OPTIONS=(--vocab-file $(find . -name vocab.json) --split 1,0,0)\n{TRAIN} ${{OPTIONS[@]}}",
    ],
)
def test_an_open_value_among_flags_is_asked_for_by_the_name_of_its_flag(written: str, tmp_path: Path) -> None:
    script = written.replace("--mock-data --tokenizer-type NullTokenizer", "--data-path a --merge-file m")
    with pytest.raises(UsageError, match=r"line [12]: --vocab-file: .*; give the value with --arg vocab-file=VALUE$"):
        read(script, tmp_path)
    data = config_of(script, tmp_path, **{"vocab-file": "v.json"}).data
    assert (data.vocab_file, data.split) == ("v.json", "1,0,0")
    with pytest.raises(UsageError, match="--arg merge-file: the script neither uses nor sets merge-file"):
        config_of(script, tmp_path, **{"merge-file": "m"})


def test_a_value_by_a_flags_name_is_its_whole_value(tmp_path: Path) -> None:
    script = f"{TRAIN.replace('--mock-data', '--data-path 0.3 <PATH TO A> 0.7 <PATH TO B>')} --lr-decay-style cosine"
    assert config_of(script, tmp_path, **{"data-path": "1 a 2 b 3 c"}).data.data_path == ["1", "a", "2", "b", "3", "c"]
    # A variable of the script does not count as a flag.
    script = f"seed=7\n{TRAIN} --seed <your data seed> --log-interval $seed"
    with pytest.raises(UsageError, match="--seed: <your data seed> .*; write the value into the script"):
        read(script, tmp_path)
    with pytest.raises(UsageError, match="--arg lr-decay-style: the script has a value for this flag; leave it out"):
        config_of(f"{TRAIN} --lr-decay-style cosine\nX=$(a)", tmp_path, **{"lr-decay-style": "linear"})


def test_open_folders_of_checkpoints_and_mounts_are_told(tmp_path: Path) -> None:
    launch = TRAIN.replace("torchrun", "srun --container-mounts '<FOLDERS TO MOUNT>' torchrun")
    found = read(f"{launch} --save <PATH TO CHECKPOINTS> \\\n --load <PATH TO CHECKPOINTS>", tmp_path)
    assert [remark.partition(": ")[0] for remark in found.remarks] == ["line 1", "line 1"]
    assert "give --arg save=VALUE for another place" in found.remarks[1]
    assert "checkpoint" not in found.sections and "mounts" not in found.sections["job"]


def test_a_given_value_stays_where_the_script_adds_what_nobody_knows(tmp_path: Path) -> None:
    script = f'ARGS=(--seed 7)\nARGS="${{ARGS[@]}} --data-path $(python3 find.py)"\n{TRAIN} $ARGS'
    with pytest.raises(
        UsageError, match=r"line 2: --data-path: \$\(python3 find.py\) is never executed; .*--arg data-path=VALUE"
    ):
        read(script, tmp_path)
    assert config_of(script, tmp_path, ARGS="--seed 8").training.seed == 8
    # What is known is added to the user's value, as before.
    more = f'ARGS="$ARGS --bf16"\n{TRAIN} $ARGS'
    assert config_of(more, tmp_path, ARGS="--seed 8").training.bf16


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("perl -e 'print 3_0*2'", 60),
        ("perl -le 'print(2+3);'", 5),
        ("bc <<< 'scale=3; 7/10'", 0.7),
        ("bc <<< 'scale=2; 2/3'", 0.66),
        ("bc <<< 'scale=40; 1/8'", 0.125),
        ("bc <<< 'scale=0; 3/2'", 1.0),
    ],
)
def test_sums_of_perl_and_quotients_of_bc(command: str, number: float, tmp_path: Path) -> None:
    assert config_of(f"LR=$({command})\n{TRAIN} --lr $LR", tmp_path).optimizer.lr == number


def test_an_open_number_of_a_quotient_is_asked_for_by_its_own_name(tmp_path: Path) -> None:
    script = f'ARGS="--min-lr $(bc <<< "scale=6; $1/10")"\n{TRAIN.replace("1e-3", "0.01")} $ARGS'
    with pytest.raises(UsageError, match=r"--min-lr: the script's argument \$1 is not set"):
        read(script, tmp_path)
    assert config_of(script, tmp_path, **{"1": "0.01"}).optimizer.min_lr == 0.001
    with pytest.raises(UsageError, match=r"--arg LR=VALUE"):
        read(f"LR=$(bc <<< 'scale=3; sqrt(2)')\n{TRAIN} --lr $LR", tmp_path)


def test_the_variable_in_a_files_name_is_asked_for_if_the_file_has_the_flags(tmp_path: Path) -> None:
    script = "TASK=${ROOT}/tasks/$NAME\nsource ${TASK}/params.sh\nPARAMS+=(--log-interval 1)\n"
    script += "torchrun pretrain_gpt.py ${PARAMS[@]}"
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError) as error:
        read(script, tmp_path / "run")
    first, second = error.value.message.split("\n")
    assert "reads $ROOT/tasks/$NAME/params.sh: $ROOT is not set; give the value with --arg ROOT=VALUE, for" in first
    assert "--arg NAME=VALUE, for the place of this file" in second
    (tmp_path / "tasks/one").mkdir(parents=True)
    (tmp_path / "tasks/one/params.sh").write_text(f"PARAMS=({FLAGS} --vocab-size 128)")
    # The folder that the user names is read, and no other.
    found = config_of(script, tmp_path / "run", ROOT=str(tmp_path), NAME="one")
    assert found.model.num_layers == 2
    with pytest.raises(UsageError, match="which is not beside the script"):
        read(script.replace("${ROOT}", str(tmp_path)), tmp_path / "run", NAME="one")


def test_all_open_parts_of_a_flag_are_asked_for_at_once(tmp_path: Path) -> None:
    script = f"{TRAIN.replace('--mock-data', '--data-path 0.3 $ONE/a 0.7 $TWO/b')}"
    with pytest.raises(UsageError) as error:
        read(script, tmp_path)
    assert "--arg ONE=VALUE" in error.value.message and "--arg TWO=VALUE" in error.value.message
    assert error.value.message.count("--data-path: ") == 2


@pytest.mark.parametrize("found", ["/data/*_document.bin", "$FOLDER/part_?.bin", "/data/part_[0-9].bin"])
def test_what_a_loop_over_files_makes_is_asked_for(found: str, tmp_path: Path) -> None:
    script = f"""FOLDER=/data; DATA=""
for file in {found}; do
  if [ -f "$file" ]; then index="${{file%.bin}}.idx"; if [[ -f $index ]]; then DATA="$DATA 1 ${{file%.bin}}"; fi; fi
done
{TRAIN.replace("--mock-data", "--data-path $DATA")}"""
    with pytest.raises(UsageError, match=r"line 2: --data-path: \$DATA depends on .*; give .* --arg DATA=VALUE"):
        read(script, tmp_path)
    assert config_of(script, tmp_path, DATA="1 a 2 b").data.data_path == ["1", "a", "2", "b"]
    assert config_of(script.replace(f"in {found}", f'in "{found}"'), tmp_path, DATA="a").data.data_path == ["a"]


def test_all_open_parts_of_a_sum_are_asked_for_at_once(tmp_path: Path) -> None:
    script = f"SIZE=$(($BATCH / $(nproc)))\nMORE=$(( SIZE * ONE ))\n{TRAIN} --micro-batch-size $SIZE"
    with pytest.raises(UsageError) as error:
        read(script, tmp_path)
    assert [one.partition("--arg ")[2] for one in error.value.message.split("\n")] == ["BATCH=VALUE", "SIZE=VALUE"]


def test_files_of_groups_are_asked_for_with_their_folder(tmp_path: Path) -> None:
    flags = "--train-weighted-split-paths-path $ROOT/train.txt --valid-weighted-split-paths-path $ROOT/valid.txt"
    script = TRAIN.replace("--mock-data", f"{flags} --vocab-file $ROOT/v --merge-file m")
    with pytest.raises(UsageError) as error:
        read(script, tmp_path)
    assert error.value.message.count("$ROOT is not set; give the value with --arg ROOT=VALUE") == 3
    assert error.value.message.count("--arg ROOT=VALUE, and put the file there, which is read") == 2
    with pytest.raises(UsageError) as error:
        read(script, tmp_path, ROOT=str(tmp_path))
    assert error.value.message.count("which is not on this machine; put it there") == 2
    for split in ("train", "valid"):
        (tmp_path / f"{split}.txt").write_text(f'"{split}: 1 0:1 {split}"')
    assert config_of(script, tmp_path, ROOT=str(tmp_path)).data.train_data_path == ["train"]
