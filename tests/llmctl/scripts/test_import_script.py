"""``llmctl import-script`` and ``llmctl submit FILE.sh``; every bad script is one sentence with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmctl.cli.main import main
from llmctl.errors import UsageError
from llmctl.scripts.import_script import ImportedScript, import_script, parse_given
from llmctl.submit.config_file import is_script
from tests.llmctl.scripts.published_scripts import NOW
from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config, load_config

FLAGS = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 10 --lr 1e-3 --mock-data"
TRAIN = f"torchrun --nproc_per_node 2 pretrain_gpt.py {FLAGS} --vocab-size 128"


def read(text: str, folder: Path, **given: str) -> ImportedScript:
    path = folder / "train.sh"
    path.write_text(text, encoding="utf-8")
    return import_script(path, "train.sh", given, NOW)


def config_of(text: str, folder: Path, **given: str) -> TrainConfig:
    return build_config(read(text, folder, **given).sections)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('torchrun "pretrain_gpt.py', r"line 1: a double quote"),
        (
            f"D=1\n{TRAIN} --vocab-file $OUT",
            r"line 2: --vocab-file: \$OUT is not set; give the value with --arg OUT=VALUE",
        ),
        (f"{TRAIN}\n$EXTRA", None),
        (f"{TRAIN} $EXTRA", r"line 1: .*\$EXTRA is not set"),
        (
            f"S=$(cat name)\n{TRAIN} --vocab-file $S",
            r"line 1: --vocab-file: \$\(cat name\) is never executed; .*--arg S=VALUE",
        ),
        (f"horovodrun -np 2 python pretrain_gpt.py {FLAGS}", r"line 1: horovodrun is not a known launcher"),
        (f"{TRAIN}\n\n{TRAIN}", r"line 1: a training program starts here and in line 3"),
        (f"for seed in 1 2; do\n{TRAIN} --seed $seed\ndone", r"line 2: a training program starts here, in a loop"),
        ("echo hello", r"^train.sh: starts no training program"),
        ("python tasks/main.py --task MNLI", r"line 1: tasks/main.py fine-tunes on a task"),
        ("python train_llama.py --x 1", r"line 1: train_llama.py is not a known training program"),
        (f"{TRAIN} --nmu-layers 2", r"line 1: --nmu-layers: unknown flag; did you mean --num-layers"),
        (f"{TRAIN} \\\n --micro-batch-size zero", r"line 2: --micro-batch-size \(training.micro_batch_size\): 'zero'"),
        (TRAIN.replace("--seq-length 32", ""), r"line 1: --seq-length \(training.seq_length\): is required"),
        (
            f"DATA=<Specify path>\n{TRAIN} --vocab-file $DATA",
            r"line 1: --vocab-file: <Specify path> is a place .*--arg DATA=VALUE",
        ),
        (f"#SBATCH --time=1h\n{TRAIN}", r"line 1: #SBATCH --time 1h: the number or time cannot be read"),
        (f"exit 1\n{TRAIN}", r"line 1: the script ends here before it trains"),
        (
            f"N=3\nif [ $((N % 2)) -ne 0 ]; then\n  echo 'N must be even' >&2\n  exit 1\nfi\n{TRAIN}",
            r"line 4: the script ends here before it trains; .*--arg NAME=VALUE \(N must be even\)$",
        ),
        ("f() { f; }\nf", r"line 1: f calls itself"),
        (f"{TRAIN} --deepspeed_config c.json\n", None),
        ("echo '{' > c.json\n" + f"{TRAIN} --deepspeed_config c.json", r"line 2: c.json: is not valid JSON"),
    ],
)
def test_a_bad_script_is_one_sentence_with_its_line(text: str, message: str | None, tmp_path: Path) -> None:
    if message is None:
        assert config_of(text, tmp_path).model.num_layers == 2
        return
    with pytest.raises(UsageError, match=message) as error:
        read(text, tmp_path)
    assert error.value.exit_code == 2 and error.value.message.startswith("train.sh") and "\n" not in error.value.message


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"\x7fELF\0\0", "is a binary file"), (b"a\n\xff\xfe b", "line 2: has bytes that are not UTF-8")],
)
def test_a_file_that_is_no_text(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_bytes(data)
    with pytest.raises(UsageError, match=message):
        import_script(tmp_path / "train.sh", "train.sh", {}, NOW)


def test_containers_directives_and_a_json_in_the_script(tmp_path: Path) -> None:
    text = f"""#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=8 --job-name my-run
#SBATCH -t 1-12 -A team -p gpu
CFG=ds.json
cat <<EOF > $CFG
{{"zero_optimization": {{"stage": 2}}, "bf16": {{"enabled": true}}, "gradient_clipping": 0.5}}
EOF
export NCCL_DEBUG=WARN WANDB_API_KEY=secret-value
srun --container-image=image.sqsh --container-mounts /data:/data,/w bash -c "deepspeed --num_nodes \\$SLURM_NNODES \\
  --num_gpus 8 pretrain_gpt.py {FLAGS} --deepspeed_config=$CFG"
"""
    found = read(text, tmp_path)
    config = build_config(found.sections)
    job = config.job
    assert (job.nodes, job.gpus_per_node, job.time, job.name) == (2, 8, "36:00:00", "my-run")
    assert (job.group, job.queue, job.container) == ("team", "gpu", "image.sqsh")
    assert job.mounts == ["/data:/data", "/w:/w"] and job.env == {"NCCL_DEBUG": "WARN"}
    assert config.parallel.zero_stage == 2 and config.training.bf16 and config.optimizer.clip_grad == 0.5
    assert "secret-value" not in found.text and "--secret WANDB_API_KEY" in found.text


def test_mail_without_an_address_is_told(tmp_path: Path) -> None:
    directives = "#SBATCH --mail-type=END\n#SBATCH --mail-user=$USER\n"
    found = read(f"{directives}python pretrain_gpt.py {FLAGS}", tmp_path)
    assert not {"notify", "notify_on"} & found.sections["job"].keys()
    assert "names no address; give --notify mailto:ADDRESS" in found.text


@pytest.mark.parametrize(
    ("directive", "keys"),
    [
        ("#$ -l rt_F=4 -g gaa -p -5", {"resource_type": "rt_F", "nodes": 4, "group": "gaa", "priority": -5}),
        ("#$ -l h_rt=3:00:30:00", {"time": "72:30:00"}),
        ("#PBS -q rt_HF\n#PBS -l select=2:mpiprocs=8,walltime=2:00:00 -P g1", {"resource_type": "rt_HF", "nodes": 2}),
        ("#BSUB -nnodes 4 -W 90 -q batch", {"nodes": 4, "time": "1:30:00", "queue": "batch"}),
        ("#SBATCH -N4 --gres=gpu:a100:8", {"nodes": 4, "gpus_per_node": 8}),
        ("#SBATCH --exclude=n[1-3,7],n9", {"exclude": ["n[1-3,7]", "n9"]}),
        ("#SBATCH -x n4", {"exclude": ["n4"]}),
        ("#SBATCH -xn4", {"exclude": ["n4"]}),
        ("#$ -l 'h=!(n1|n2)' -l rt_F=2", {"exclude": ["n1", "n2"], "nodes": 2}),
        ("#$ -l hostname=!n1", {"exclude": ["n1"]}),
        (
            "#SBATCH --mail-type=END,FAIL\n#SBATCH --mail-user=me@lab",
            {"notify": ["mailto:me@lab"], "notify_on": ["end", "fail"]},
        ),
        ("#PBS -m ae -M me@lab,you@lab", {"notify": ["mailto:me@lab", "mailto:you@lab"], "notify_on": ["fail", "end"]}),
    ],
)
def test_directives_of_each_scheduler(directive: str, keys: dict[str, object], tmp_path: Path) -> None:
    job = read(f"{directive}\npython pretrain_gpt.py {FLAGS}", tmp_path).sections["job"]
    assert keys.items() <= job.items()


def test_a_growing_batch_and_the_decay_that_follows_from_its_samples(tmp_path: Path) -> None:
    flags = FLAGS.replace("--train-iters 10", "--rampup-batch-size 4 4 24 --global-batch-size 16 --train-samples 400")
    found = read(f"torchrun pretrain_gpt.py {flags} --micro-batch-size 1", tmp_path)
    assert (found.sections["training"]["train_iters"], found.sections["optimizer"]["lr_decay_iters"]) == (27, 25)
    assert "  lr_decay_iters: 25  # --train-samples, line 1\n" in found.text


def test_batch_sizes_in_steps(tmp_path: Path) -> None:
    flags = FLAGS.replace("--train-iters 10", "--train-samples 400 --step-batch-size-schedule '0:4 1K:8'")
    found = read(f"torchrun pretrain_gpt.py {flags} --micro-batch-size 1", tmp_path)
    assert found.sections["training"]["step_batch_size_schedule"] == "0:4 1K:8"
    assert found.sections["optimizer"]["lr_decay_iters"] == 50


def test_names_of_trackers_that_only_the_job_knows_are_left_out(tmp_path: Path) -> None:
    flags = "--wandb-project p --wandb-name llama-$SLURM_JOB_ID --wandb-group $G --tensorboard-dir $D/tb"
    found = read(f"srun python pretrain_gpt.py {FLAGS} {flags}", tmp_path)
    assert found.sections["logging"] == {"wandb_project": "p", "wandb_name": "llama-"}
    assert found.ignored == 2
    assert "--tensorboard-dir (line 1): a part of its value is known to the job alone" in found.text
    found = read(f"srun python pretrain_gpt.py {FLAGS} --tensorboard-dir tb --use_wandb", tmp_path)
    assert found.sections["logging"] == {"tensorboard_dir": "tb", "wandb_project": "llmctl"}


def test_excluded_nodes_of_srun_and_words_that_name_no_nodes(tmp_path: Path) -> None:
    found = read(f"#SBATCH --exclude=n1\nsrun -x n2,n3 python pretrain_gpt.py {FLAGS}", tmp_path)
    assert found.sections["job"]["exclude"] == ["n2", "n3"]
    for script in (
        f"#SBATCH --exclude=/site/bad_nodes\n{TRAIN}",
        f"#$ -l h=!(n1*|n2)\n{TRAIN}",
        f"#$ -l h=n1\n{TRAIN}",
        f"srun --exclude=$BAD python pretrain_gpt.py {FLAGS}",
    ):
        found = read(script, tmp_path)
        assert "exclude" not in found.sections.get("job", {}) and found.ignored == 1
    assert "--exclude (line 1): names no nodes that can be read here; give them with --exclude" in found.text


def test_nothing_of_a_script_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    text = f"touch {marker}\nX=$(touch {marker}; echo 1)\neval 'touch {marker}'\n`touch {marker}`\n{TRAIN}"
    read(text, tmp_path)
    assert not marker.exists()


def test_import_script_writes_a_config_that_submits_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    (tmp_path / "train.sh").write_text(f"python pretrain_gpt.py {FLAGS} --vocab-size 128 --seed $SEED\n")
    assert main(["import-script", "train.sh", "--output", "train.yaml"], home) == 2
    assert "train.sh, line 1: --seed: $SEED is not set" in capsys.readouterr().err
    assert not (tmp_path / "train.yaml").exists()
    assert main(["import-script", "train.sh", "--arg", "SEED=7", "--output", "train.yaml"], home) == 0
    assert load_config(tmp_path / "train.yaml").training.seed == 7
    assert main(["import-script", "train.sh", "--arg", "SEED=7", "--output", "train.yaml"], home) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["import-script", "train.sh", "--cluster", "local"], home) == 2
    capsys.readouterr()
    shown = []
    for command in (
        ["submit", "train.yaml"],
        ["submit", "train.sh", "--arg", "SEED=7"],
        ["import-script", "train.sh", "--arg", "SEED=7", "--run"],
    ):
        code = main([*command, "--dry-run", "--json", "--set", "job.name=one", "--set", "training.device=cpu"], home)
        captured = capsys.readouterr()
        shown.append((code, captured.err, captured.out.count("pretrain")))
    assert {code for code, _, _ in shown} == {0}, shown
    assert shown[0][2] == shown[1][2] == shown[2][2] > 0


def test_scripts_and_variables_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("#!/bin/bash\n")
    assert is_script(tmp_path / "job") and is_script(Path("a.sbatch")) and not is_script(Path("a.yaml"))
    assert parse_given(["1=a", "X=b=c"]) == {"1": "a", "X": "b=c"}
    with pytest.raises(UsageError, match="--arg X"):
        parse_given(["X"])
