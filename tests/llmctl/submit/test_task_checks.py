"""Task files that a config names are checked before the job is queued."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmctl.submit.checks.config import generated_data_warnings, task_file_problems
from llmctl.transport.file_reads import read_parts
from trainer.config.paths.task_files import is_task_file
from trainer.planning.build_config import build_config

CONTENTS = {
    "good.yaml": ("task: mine\ndoc_to_target: !function functions.answer\n", None),
    "broken.yaml": ("task: [mine", "it is not valid YAML"),
    "list.yaml": ("[1]", "it has no keys of a task"),
    "empty.yaml": ("", "it has no keys of a task"),
    "binary.yaml": ("\x00\x01", "it is not valid YAML"),
}


TRANSPORT: Any = SimpleNamespace(read_parts=read_parts)
"""Reads on this machine."""


def job_of(**sections: Any) -> Any:
    config = build_config(
        {
            "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1},
            "training": {"train_iters": 1, "seq_length": 8},
            "optimizer": {"lr": 1e-3},
            **sections,
        }
    )
    profile = SimpleNamespace(container=SimpleNamespace(mounts=()))
    return SimpleNamespace(config=config, profile=profile, spec=SimpleNamespace(mounts=()))


def problems_of(tasks: list[str]) -> list[Any]:
    """Problems of a job whose config names ``tasks``."""
    job = job_of(data={"mock_data": True, "tokenizer_model": "/t.json"}, evaluation={"tasks": tasks})
    return task_file_problems(job, TRANSPORT)


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_that_is_no_task_is_named(tmp_path: Path, name: str) -> None:
    content, words = CONTENTS[name]
    (tmp_path / name).write_text(content)
    found = problems_of([str(tmp_path / name), "arc_easy"])
    if words is None:
        assert found == []
    else:
        [problem] = found
        assert problem.key == "evaluation.tasks"
        assert problem.text.startswith(f"{tmp_path / name} cannot be loaded: {words}")
        assert "\n" not in problem.text


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    [problem] = problems_of([str(tmp_path / "gone.yaml")])
    assert "cannot be read" in problem.text


def test_names_are_not_read() -> None:
    assert not is_task_file("arc_easy") and is_task_file("./mine") and is_task_file("a.yml")
    assert problems_of(["arc_easy"]) == []


def test_a_run_on_generated_data_is_told_that_generate_will_refuse_it():
    [line] = generated_data_warnings(job_of(data={"mock_data": True}).config)
    assert line.startswith("data.mock_data: generated data has no tokenizer, so `llmctl generate` refuses this run; ")
    assert generated_data_warnings(job_of(data={"mock_data": True, "tokenizer_model": "/t.json"}).config) == []
    assert generated_data_warnings(job_of(data={"data_path": ["/d"]}).config) == []
