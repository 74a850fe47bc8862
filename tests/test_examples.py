"""The bundled configs train, and the demo prepares data, starts, resumes and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.waiting import HANG_S, wait_for
from trainer.families.catalogue import family_of_model
from trainer.planning.build_config import build_config, load_config
from trainer.planning.checks import check_world_size
from trainer.planning.flops import count_parameters

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_examples_are_valid_for_the_nodes_they_are_written_for(path: Path) -> None:
    config = load_config(path)
    per_node = 1 if config.job.name in ("demo", "gpt-small") else 8
    check_world_size(config, config.job.nodes * per_node)
    assert build_config(yaml.safe_load(yaml.safe_dump(config.model_dump()))) == config


@pytest.mark.parametrize(
    ("name", "vocab_size", "total", "active"),
    [
        # Billions; the authors state 46.7 and 12.9, about 47 and 13, and 8.
        ("mixtral_8x7b", 32000, 46.7, 12.9),
        ("tanuki_8x8b", 65024, 47.0, 13.2),
        ("llama3_8b", 128256, 8.0, 8.0),
        ("t5_base", 32128, 0.2, 0.2),
        # 13 and 8; those of one expert, its attention and the tables.
        ("gpt3_13b", 50257, 12.9, 12.9),
        ("tanuki_8b", 65024, 7.5, 7.5),
    ],
)
def test_examples_have_the_published_sizes(name: str, vocab_size: int, total: float, active: float) -> None:
    counts = count_parameters(load_config(EXAMPLES / f"{name}.yaml"), vocab_size)
    assert (round(counts.total / 1e9, 1), round(counts.active / 1e9, 1)) == (total, active)


@pytest.mark.parametrize(
    ("name", "vocab_size", "family", "parameters"),
    [
        # The parameters of gpt2-medium and facebook/opt-350m.
        ("gpt2_345m", 50257, "GPT-2", 354_823_168),
        ("opt_350m", 50272, "OPT", 331_196_416),
        ("gpt3_1.3b", 50257, "GPT-2", None),
        ("gpt3_13b", 50257, "GPT-2", None),
        ("gpt_small", 256, "Llama", None),
        ("llama2_7b", 32000, "Llama", 6_738_415_616),
        ("llama3_8b", 128256, "Llama", 8_030_261_248),
        ("tanuki_8b", 65024, "Llama", None),
        ("mixtral_8x7b", 32000, "Mixtral", 46_702_792_704),
        ("tanuki_8x8b", 65024, "Mixtral", None),
    ],
)
def test_examples_are_of_published_families(name: str, vocab_size: int, family: str, parameters: int | None) -> None:
    config = load_config(EXAMPLES / f"{name}.yaml")
    assert family_of_model(config.model).name == family
    assert parameters in (None, count_parameters(config, vocab_size).total)


def test_the_default_example_needs_no_files_and_fits_any_number_of_nodes() -> None:
    config = load_config(EXAMPLES / "gpt_small.yaml")
    assert config.data.mock_data
    assert config.training.global_batch_size is None
    for nodes in range(1, 33):
        check_world_size(config, nodes)
    for tp in (1, 2, 4, 8):
        config = build_config(
            yaml.safe_load((EXAMPLES / "gpt_small.yaml").read_text())
            | {"parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 8 // tp}}
        )
        check_world_size(config, 8)


def demo(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    small = yaml.safe_load((EXAMPLES / "demo.yaml").read_text())
    small["model"] |= {"num_layers": 1, "hidden_size": 16}
    small["training"] |= {"train_iters": 8, "seq_length": 32, "eval_iters": 1}
    small["checkpoint"]["save_interval"] = 4
    small["logging"]["log_interval"] = 1
    config = folder / "small.yaml"
    config.write_text(yaml.safe_dump(small))
    return subprocess.run(
        [
            *(sys.executable, "-m", "examples.demo", str(config), "--folder", str(folder / "demo")),
            # Enough text for the vocabulary; the whole library would take most of the test's time.
            *("--text", str(Path(sysconfig.get_path("stdlib")) / "asyncio")),
            *arguments,
        ],
        cwd=EXAMPLES.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.timeout(1200)
def test_the_demo_starts_resumes_and_starts_a_new_run(tmp_path: Path) -> None:
    # The compiler never ends. The run does not wait for it, and the demo leaves none of its processes.
    nap = f"5000.{os.getpid()}"
    compiler = tmp_path / "slow-c++"
    compiler.write_text(f'#!/bin/bash\nif [[ $* == *--version* ]]; then echo "slow 1.0"; else sleep {nap}; fi\n')
    compiler.chmod(0o755)
    without_kernels = {"CXX": str(compiler), "LLMCTL_CACHE_DIR": str(tmp_path / "cache")}
    stopped = demo(tmp_path, "--set", "training.exit_interval=4", **without_kernels)
    assert stopped.returncode != 0, stopped.stdout
    assert "built in the background; this run trains on torch's operations" in stopped.stdout
    assert "kernels: torch for adamw; reference for " in stopped.stdout
    left = partial(subprocess.run, ["pgrep", "-f", f"sleep {nap}"], capture_output=True, check=False)
    wait_for(lambda: not left().stdout, "the end of the compilers")
    assert "Starting the new run demo-" in stopped.stdout
    assert "vocabulary of 4096" in stopped.stdout
    prepared = {path.name: path.read_bytes() for path in (tmp_path / "demo" / "data").iterdir() if path.is_file()}
    resumed = demo(tmp_path)
    # The first request still applies, so the run stops at the next multiple of 4, which is its last iteration.
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "Using the existing tokens." in resumed.stdout
    assert "is cancelled: resuming it." in resumed.stdout
    for what in ("training loss: ", "held-out text: loss ", "bits per byte", "the frequency of each token: loss "):
        assert what in resumed.stdout
    assert "def read(self, path):" in resumed.stdout
    (run,) = (tmp_path / "demo" / "runs").glob("demo-*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted({row["iteration"] for row in rows}) == list(range(1, 9))
    assert prepared == {
        path.name: path.read_bytes() for path in (tmp_path / "demo" / "data").iterdir() if path.is_file()
    }
    (tmp_path / "demo" / "data" / "python_text_document.bin").write_bytes(b"damaged")
    # A third training would test nothing new: a misspelt key ends it at the submission, with the exit code of llmctl.
    anew = demo(tmp_path, "--set", "training.train_iter=2")
    assert anew.returncode == 2, anew.stdout + anew.stderr
    assert "did you mean training.train_iters?" in anew.stderr
    assert f"The last run, {run.name}, is done. Starting the new run" in anew.stdout
    assert (tmp_path / "demo" / "data" / "python_text_document.bin").read_bytes() == prepared[
        "python_text_document.bin"
    ]
