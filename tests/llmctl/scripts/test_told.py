"""Words of a script that change what runs, and have no counterpart: applied, or told before the job is queued."""

from datetime import datetime
from pathlib import Path

import pytest

from llmctl.scripts.folder_meaning import PATHS
from llmctl.scripts.import_script import ImportedScript, import_script
from trainer.config.paths.variables import PATH_KEYS

NOW = datetime(2026, 1, 2, 3, 4, 5)
FLAGS = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 16 --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 100 "
)
LAUNCH = f"torchrun --nproc_per_node 1 {FLAGS}"


def read(folder: Path, text: str, **given: str) -> ImportedScript:
    path = folder / "train.sh"
    path.write_text(text)
    return import_script(path, "train.sh", given, NOW)


@pytest.mark.parametrize(
    ("before", "saved", "expected"),
    [
        ("cd work", "ck", "work/ck"),
        ("cd work", "$PWD/ck", "./work/ck"),
        ("cd work/deep && cd ../other", "ck", "work/other/ck"),
        ("cd /w/megatron || exit 1", "ck", "/w/megatron/ck"),
        ("cd ~/w", "ck", "~/w/ck"),
        ("cd work", "/abs/ck", "/abs/ck"),
        ("cd work", "~/ck", "~/ck"),
        ('cd "$(dirname "$0")"', "ck", "ck"),
        ('cd "$(dirname "$0")/.."', "ck", "../ck"),
        ("HERE=$PWD; cd work", "$HERE/ck", "./ck"),
        ("HERE=$(pwd)/x; cd work", "$HERE/ck", "./x/ck"),
        ("HERE=$(cd $(dirname $0) && pwd); cd work", "$HERE/ck", "./ck"),
        ("HERE=$(dirname $(realpath $0)); cd work", "${HERE}/ck", "./ck"),
        ("HERE=$PWD/sub/; cd work", "${HERE%/}/ck", "./sub/ck"),
        ("cd work; cd -", "ck", "ck"),
        ('RUN="export HERE=$(pwd)/x; cd work"; eval $RUN', "$HERE/ck", "./x/ck"),
        ("pushd work; pushd deep; popd", "ck", "work/ck"),
        ("( cd work; make )", "ck", "ck"),
        ("cd $SLURM_SUBMIT_DIR", "ck", "ck"),
        ("cd work; cd $SLURM_SUBMIT_DIR", "ck", "ck"),
        ("#SBATCH --chdir=/w", "ck", "/w/ck"),
        ("#SBATCH -D /w", "$SLURM_SUBMIT_DIR/ck", "./ck"),
        ("#SBATCH --chdir=/w\ncd deep", "ck", "/w/deep/ck"),
        ("#$ -wd /w", "ck", "/w/ck"),
        ("#$ -cwd", "ck", "ck"),
        ("#PBS -d .", "ck", "ck"),
    ],
)
def test_relative_paths_are_below_the_folder_of_cd(before: str, saved: str, expected: str, tmp_path: Path) -> None:
    found = read(tmp_path, f"{before}\n{LAUNCH} --mock-data --save {saved}\n")
    assert found.sections["checkpoint"]["save"] == expected
    assert found.remarks == ()


@pytest.mark.parametrize(
    "launcher",
    [
        *(
            "mpirun -wdir /w -np 1 python",
            "mpirun --wdir /w -np 1 python",
            "srun -D /w python",
            "srun --chdir=/w python",
        ),
        *("singularity exec --pwd /w image.sif python", "docker run -w /w image python", "env -C /w python"),
        *("uv run --directory /w python", "conda run --cwd /w python"),
    ],
)
def test_a_launcher_moves_relative_paths(launcher: str, tmp_path: Path) -> None:
    found = read(tmp_path, f"{launcher} {FLAGS} --mock-data --save ck\n")
    assert found.sections["checkpoint"]["save"] == "/w/ck"
    assert "below /w" in found.text


def test_cd_moves_each_path_of_a_blend_and_the_line_of_a_nested_shell(tmp_path: Path) -> None:
    text = f"bash -c 'cd data; {LAUNCH} --data-path 0.5 a 0.5 /b/c'\n"
    found = read(tmp_path, text)
    assert found.sections["data"]["data_path"] == ["0.5", "data/a", "0.5", "/b/c"]
    assert "below ./data (cd, line 1)" in found.text


def test_a_folder_that_only_the_job_knows_is_told(tmp_path: Path) -> None:
    text = f"cd $(git rev-parse --show-toplevel)\n{LAUNCH} --mock-data"
    assert read(tmp_path, text).remarks == ()
    (told,) = read(tmp_path, f"{text} --save ck --load ck").remarks
    assert told.startswith("line 1: cd: only the job knows $(git rev-parse --show-toplevel), so checkpoint.save and")
    assert read(tmp_path, f"cd $REPO\n{LAUNCH} --mock-data --save ck", REPO="/r").sections["checkpoint"] == {
        "save": "/r/ck"
    }


def test_a_flag_whose_key_comes_from_another_flag_is_told(tmp_path: Path) -> None:
    flags = "--mock-data --checkpoint-activations --deepspeed-activation-checkpointing --no-pipeline-parallel"
    text = read(tmp_path, f"{LAUNCH} {flags} --pipeline-model-parallel-size 1 --lr 1e-4\n").text
    for flag, key, other in (
        ("checkpoint-activations", "training.recompute_granularity", "deepspeed-activation-checkpointing"),
        ("no-pipeline-parallel", "parallel.pipeline_model_parallel_size", "pipeline-model-parallel-size"),
    ):
        assert f"#   --{flag} (line 1): {key} comes from --{other}, line 1" in text
    assert "--lr 1e-4 (line 1)" not in text
    (tmp_path / "ds.json").write_text('{"train_batch_size": 16}')
    text = read(tmp_path, f"{LAUNCH} --mock-data --deepspeed_config=ds.json\n").text
    assert "--deepspeed_config ds.json (line 1): the flags beside the JSON say the same" in text


def test_the_keys_that_cd_moves_are_paths() -> None:
    assert PATH_KEYS - set(PATHS) == {"model.from", "evaluation.tasks", "job.code"}
    assert set(PATHS) <= PATH_KEYS


@pytest.mark.parametrize(
    "directive",
    ["#SBATCH --array=0-9", "#SBATCH -a 1-10%1", "#$ -t 1-10", "#PBS -J 0-9", "#PBS -t 1-4", '#BSUB -J "a[1-10]"'],
)
def test_an_array_of_jobs_is_told(directive: str, tmp_path: Path) -> None:
    found = read(tmp_path, f"#!/bin/bash\n{directive}\n{LAUNCH} --mock-data\n")
    (told,) = found.remarks
    assert told.startswith("line 2: #") and "an array of jobs becomes one job" in told
    assert "an array of jobs becomes one job" in found.text


@pytest.mark.parametrize("directive", ["#$ -tc 4", "#SBATCH --account=a", "#PBS -l walltime=1:00:00", "#BSUB -J a"])
def test_other_directives_are_not_arrays(directive: str, tmp_path: Path) -> None:
    assert read(tmp_path, f"#!/bin/bash\n{directive}\n{LAUNCH} --mock-data\n").remarks == ()


def test_ranks_without_a_number_for_each_node_are_told(tmp_path: Path) -> None:
    found = read(tmp_path, f"mpirun -np 16 python {FLAGS} --mock-data\n")
    assert found.sections["job"] == {"gpus_per_node": 16}
    assert found.remarks == (
        "line 1: -np 16: 16 ranks become 16 GPUs of one node, because nothing says how many a node has; give --nodes "
        "and --gpus-per-node for more nodes",
    )


@pytest.mark.parametrize(
    "text",
    [
        f"mpirun -np 16 --npernode 4 python {FLAGS} --mock-data\n",
        f"#SBATCH --nodes=2\nmpirun -np 16 python {FLAGS} --mock-data\n",
        f"mpirun -np 1 python {FLAGS} --mock-data\n",
        f"accelerate launch --num_processes 8 {FLAGS} --mock-data\n",
    ],
)
def test_ranks_of_known_nodes_are_not_told(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text).remarks == ()


@pytest.mark.parametrize(
    ("json", "flags", "told"),
    [
        ('{"fp16": {"enabled": true, "loss_scale": 0}}', "--fp16 --loss-scale 12", "fp16.loss_scale says 0 (a scale"),
        ('{"fp16": {"enabled": true}}', "--fp16 --loss-scale 12", "fp16.loss_scale says 0 (a scale"),
        ('{"gradient_clipping": 0.5}', "--clip-grad 1.0", "gradient_clipping says 0.5, which DeepSpeed's engine takes"),
        ('{"zero_optimization": {"stage": 1}}', "--zero-stage 2", "zero_optimization.stage says optim, which"),
        ('{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1, "steps_per_print": 7}', "--clip-grad 1.0", ""),
        ('{"fp16": {"enabled": true, "loss_scale": 12}}', "--fp16 --loss-scale 12", ""),
        ('{"fp16": {"enabled": true, "loss_scale": "auto"}}', "--fp16 --loss-scale 12", ""),
        ('{"fp16": {"enabled": true, "loss_scale": 0}}', "--fp16", ""),
    ],
)
def test_a_deepspeed_json_that_contradicts_a_flag_is_told(json: str, flags: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json)
    launch = f"{LAUNCH} --mock-data --log-interval 5 {flags} --deepspeed --deepspeed_config ds.json\n"
    remarks = read(tmp_path, launch).remarks
    assert len(remarks) == bool(told)
    assert all(f"--deepspeed_config: {told}" in remark for remark in remarks)


def test_a_number_of_nodes_that_is_given_at_the_submission_is_told(tmp_path: Path) -> None:
    found = read(tmp_path, f"#SBATCH --nodes=0\n{LAUNCH} --mock-data")
    assert "nodes" not in found.sections["job"]
    assert found.remarks == (
        "line 1: #SBATCH --nodes 0: stands for a number that is given at the submission; give --nodes",
    )


def test_words_in_place_of_a_jobs_numbers_are_told(tmp_path: Path) -> None:
    words = "#SBATCH --nodes=your_own_num_nodes\n#SBATCH --ntasks-per-node=your_tasks\n#SBATCH --time=your_own_time\n"
    found = read(tmp_path, f"{words}{LAUNCH} --mock-data")
    assert not found.sections["job"].keys() & {"nodes", "time"}
    assert [remark.partition(": stands for ")[2] for remark in found.remarks] == [
        "a number that is given at the submission; give --nodes",
        "a limit that is given at the submission; give --time",
    ]


@pytest.mark.parametrize("end", ["EOF", "'EOF'"])
def test_a_script_that_another_submits_from_its_own_text_is_read(end: str, tmp_path: Path) -> None:
    start = "mkdir -p logs || { exit 1; }\nSEED=7" if end == "EOF" else "export SEED=7"
    text = f"{start}\nsbatch --exclusive <<{end}\n#!/bin/bash\n#SBATCH --nodes=2\nINNER=1\n{LAUNCH} --mock-data"
    found = read(tmp_path, f"{text} --seed $SEED\nEOF\necho $INNER")
    assert (found.sections["job"]["nodes"], found.sections["training"]["seed"]) == (2, 7)
