"""Scripts of the published forms: whole texts become configs, which load again and train. About 6 s on one core."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmctl.errors import UsageError
from llmctl.scripts.import_script import import_script
from tests.llmctl.scripts.published_scripts import (
    NAMES,
    NOW,
    PAGE,
    given_to,
    page_with_table,
    path_of,
    statuses,
)
from tests.rank_server import rank_context
from tests.resume_torture import free_port
from tests.waiting import HANG_S
from trainer.config.blends import parse_blend
from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config, load_config

REFUSED: dict[str, set[str]] = dict.fromkeys(
    ("geniac_llama3_8b", "tsubame_llama3_8b", "tsubame_mixtral_8x7b"), {"fp8-format"}
)
"""Script -> flags that the trainer refuses. Such a script is read without them."""


def readable(name: str, folder: Path) -> Path:
    """The script without its refused flags."""
    text = path_of(name).read_text(encoding="utf-8")
    for flag in REFUSED.get(name, ()):
        text = re.sub(rf'--{flag}(?![\w-])( [^-\s\\"][^\s\\"]*)?', "", text)
    path = folder / f"{name}.sh"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_flags_of_a_published_script(name: str) -> None:
    refused = {flag for flag, status in statuses(name).items() if status == "refused"}
    assert refused == REFUSED.get(name, set())
    if refused:
        with pytest.raises(UsageError, match=rf"^{name}, line \d+: --[\w-]+: "):
            import_script(path_of(name), name, given_to(name), NOW)


@pytest.mark.parametrize("name", NAMES)
def test_a_written_config_loads_to_the_same_values(name: str, tmp_path: Path) -> None:
    script = readable(name, tmp_path)
    found = import_script(script, name, given_to(name), NOW)
    written = tmp_path / "config.yaml"
    written.write_text(found.text, encoding="utf-8")
    assert load_config(written) == build_config(found.sections)
    text = script.read_text(encoding="utf-8").splitlines()
    lines = [line for line in found.text.splitlines() if re.match(r"  \w+: ", line)]
    assert all("  # " in line for line in lines), "every line names its origin"
    for flag, line in re.findall(r"# (--[\w-]+), line (\d+)$", found.text, re.MULTILINE):
        assert flag in text[int(line) - 1]


def imported(name: str, folder: Path) -> TrainConfig:
    return build_config(import_script(readable(name, folder), name, given_to(name), NOW).sections)


def test_launchers_and_directives_become_keys_of_the_job(tmp_path: Path) -> None:
    jobs = {name: imported(name, tmp_path).job for name in NAMES}
    sizes = {name: (job.nodes, job.gpus_per_node, job.resource_type, job.time) for name, job in jobs.items()}
    assert sizes == {
        "abci_gpt": (1, None, "rt_G.small", "1:00:00"),
        "abci_gpt_node": (1, 4, "rt_F", "1:00:00"),
        "abci_gpt_nodes": (8, 4, "rt_F", "1:00:00"),
        "bert": (1, 1, None, None),
        "bert_distributed": (1, 8, None, None),
        "geniac_llama3_8b": (1, 8, None, None),
        "t5_distributed": (1, 8, None, None),
        "tanuki_phase1": (2, None, "rt_AF", "10:00:00"),
        "tsubame_llama3_8b": (4, 4, "node_f", "24:00:00"),
        "tsubame_mixtral_8x7b": (16, 4, "node_f", "24:00:00"),
    }
    assert jobs["tsubame_llama3_8b"].priority == -5
    assert jobs["geniac_llama3_8b"].env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_the_entry_point_decides_the_architecture(tmp_path: Path) -> None:
    found = {name: imported(name, tmp_path).model.architecture for name in NAMES}
    assert {name: kind for name, kind in found.items() if kind != "decoder"} == {
        "bert": "bert",
        "bert_distributed": "bert",
        "t5_distributed": "t5",
    }


def test_values_of_a_script_with_arguments_branches_and_a_here_document(tmp_path: Path) -> None:
    config = imported("tanuki_phase1", tmp_path)
    assert config.checkpoint.save == "/data/model/checkpoint/gpt_1.3B_tok300B_z1_pp2"
    assert config.data.tokenizer_model == "/data/tokenizer.model"
    assert config.parallel.zero_stage == 1 and config.training.loss_scale_window == 500
    assert config.training.initial_loss_scale == 2.0**11


def test_the_first_run_of_a_script_loads_its_starting_checkpoint(tmp_path: Path) -> None:
    config = imported("tsubame_llama3_8b", tmp_path)
    assert config.checkpoint.load == "/data/hf-to-megatron/tp2-pp2" and config.checkpoint.no_load_optim
    assert [part.prefix for part in parse_blend("data.data_path", config.data.data_path)] == [
        "/data/ja_wiki_text_document",
        "/data/en_wiki_text_document",
    ]


def small_config(name: str, folder: Path) -> dict[str, Any]:
    """The script's config with small sizes, and without the paths of its machine."""
    sections = import_script(readable(name, folder), name, given_to(name, is_small=True), NOW).sections
    values: dict[str, Any] = {section: dict(keys) for section, keys in sections.items() if section != "job"}
    values["model"] |= {"vocab_size": 128, "make_vocab_size_divisible_by": 8}
    values["training"] |= {"device": "cpu", "kernel_backend": "reference", "eval_iters": 1}
    values["data"] = {"mock_data": True, "num_workers": 0}
    values["checkpoint"] = {}
    values["logging"] = {"log_interval": 1}
    return values


def train_all(folders: list[Path]) -> None:
    """Train every folder's config in this process, one after the other."""
    from trainer.__main__ import main

    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    for folder in folders:
        os.environ |= {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LLMCTL_ATTEMPT"), "1"),
            **{"LLMCTL_RUN_DIR": str(folder), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        }
        (folder / "code").write_text(str(main(["pretrain", "--config", str(folder / "config.yaml")])))


def test_every_published_script_trains_ten_steps(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in NAMES]
    for folder in folders:
        (folder / "attempts" / "1").mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(small_config(folder.name, tmp_path)), encoding="utf-8")
    process = rank_context().Process(target=train_all, args=(folders,))
    process.start()
    try:
        process.join(timeout=HANG_S)
    finally:
        process.kill()
        process.join(timeout=HANG_S)
    for folder in folders:
        log = folder / "attempts" / "1" / "rank-00000.log"
        told = log.read_text() if log.exists() else ""
        assert (folder / "code").exists() and (folder / "code").read_text() == "0", f"{folder.name}: {told}"
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses = [row["lm_loss"] for row in rows if "lm_loss" in row]
        assert len(losses) == 10 and all(0 < loss < 20 for loss in losses), folder.name


def test_the_table_of_flags_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_with_table(), (
        "write the page: python -m tests.llmctl.scripts.published_scripts"
    )
