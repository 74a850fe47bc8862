"""Scripts of the published forms: whole texts become configs, which load again and train. About 6 s on one core."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from llmctl.errors import UsageError
from llmctl.scripts.import_script import import_script
from tests.llmctl.scripts.published_machine import train_all
from tests.llmctl.scripts.published_scripts import (
    FP8,
    NAMES,
    NOW,
    PAGE,
    given_to,
    page_with_table,
    path_of,
    statuses,
)
from tests.rank_server import rank_context
from tests.waiting import HANG_S
from trainer.config.blends import parse_blend
from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config, load_config


@pytest.mark.parametrize("name", NAMES)
def test_flags_of_a_published_script(name: str) -> None:
    refused = {flag for flag, status in statuses(name).items() if status == "refused"}
    assert refused == ({"fp8-format"} if name in FP8 else set())


@pytest.mark.parametrize("name", FP8)
def test_fp8_is_refused_with_the_argument_that_trains_in_bf16(name: str) -> None:
    given = {key: value for key, value in given_to(name).items() if key != "fp8"}
    with pytest.raises(UsageError) as caught:
        import_script(path_of(name), name, given, NOW)
    sentence = "--fp8-format: fp8 training is not supported; --arg fp8=bf16 trains this script in bf16"
    assert re.fullmatch(rf"{name}, line \d+: {sentence}", str(caught.value))
    found = import_script(path_of(name), name, given_to(name), NOW)
    assert found.sections["training"]["bf16"] is True
    assert any("trains in bf16 instead of fp8, as --arg fp8=bf16 says" in remark for remark in found.remarks)


@pytest.mark.parametrize("name", NAMES)
def test_a_written_config_loads_to_the_same_values(name: str, tmp_path: Path) -> None:
    script = path_of(name)
    found = import_script(script, name, given_to(name), NOW)
    written = tmp_path / "config.yaml"
    written.write_text(found.text, encoding="utf-8")
    assert load_config(written) == build_config(found.sections)
    text = script.read_text(encoding="utf-8").splitlines()
    lines = [line for line in found.text.splitlines() if re.match(r"  \w+: ", line)]
    assert all("  # " in line for line in lines), "every line names its origin"
    for flag, line in re.findall(r"# (--[\w-]+), line (\d+)$", found.text, re.MULTILINE):
        assert flag in text[int(line) - 1]


def imported(name: str) -> TrainConfig:
    return build_config(import_script(path_of(name), name, given_to(name), NOW).sections)


def test_launchers_and_directives_become_keys_of_the_job() -> None:
    jobs = {name: imported(name).job for name in NAMES}
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


def test_the_entry_point_decides_the_architecture() -> None:
    found = {name: imported(name).model.architecture for name in NAMES}
    assert {name: kind for name, kind in found.items() if kind != "decoder"} == {
        "bert": "bert",
        "bert_distributed": "bert",
        "t5_distributed": "t5",
    }


def test_the_t5_script_becomes_megatrons_t5() -> None:
    model = imported("t5_distributed").model
    assert (model.position_embedding_type, model.normalization, model.max_position_embeddings) == (
        "learned_absolute",
        "LayerNorm",
        512,
    )
    assert model.has_qkv_bias and model.has_head_bias and not model.scales_decoder_output
    assert not model.stack_output_dropout


def test_values_of_a_script_with_arguments_branches_and_a_here_document() -> None:
    config = imported("tanuki_phase1")
    assert config.checkpoint.save == "/data/model/checkpoint/gpt_1.3B_tok300B_z1_pp2"
    assert config.data.tokenizer_model == "/data/tokenizer.model"
    assert config.parallel.zero_stage == 1 and config.training.loss_scale_window == 500
    assert config.training.initial_loss_scale == 2.0**11


def test_the_first_run_of_a_script_loads_its_starting_checkpoint() -> None:
    config = imported("tsubame_llama3_8b")
    assert config.checkpoint.load == "/data/hf-to-megatron/tp2-pp2" and config.checkpoint.no_load_optim
    assert [part.prefix for part in parse_blend("data.data_path", config.data.data_path)] == [
        "/data/ja_wiki_text_document",
        "/data/en_wiki_text_document",
    ]


def test_every_published_script_trains_ten_steps_on_its_own_files(home: Path) -> None:
    """With the precision, data, tokenizer and checkpoints of the script; only sizes are smaller, and fp8 is bf16."""
    process = rank_context().Process(target=train_all, args=(home, NAMES, dict(os.environ)))
    process.start()
    try:
        process.join(timeout=HANG_S)
    finally:
        process.kill()
        process.join(timeout=HANG_S)
    for name in NAMES:
        run_dir = home / "runs" / name
        log = run_dir / "attempts/1/rank-00000.log"
        told = log.read_text() if log.exists() else (home / "log").read_text(errors="replace")
        assert (run_dir / "code").exists() and (run_dir / "code").read_text() == "0", f"{name}: {told}"
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        losses = {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}
        # Without --finetune a start goes on at its own iteration, 1.
        assert [*losses] == [*range(2 if name.startswith("tsubame") else 1, 11)], name
        assert all(0 < loss < 20 for loss in losses.values()), name


def test_the_table_of_flags_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_with_table(), (
        "write the page: python -m tests.llmctl.scripts.published_scripts"
    )
