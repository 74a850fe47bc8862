"""Names that people give in place of a path: a model of the Hugging Face Hub, a file of a dataset, text."""

import os
from pathlib import Path

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.errors import UsageError
from tests.llmctl.submit.test_config_file import CONFIG
from tests.llmctl.submit.test_remote_submit import context, plan
from trainer.config.paths.hub_names import is_hub_name

__all__ = ["context"]
HUB = "; download a model of the Hugging Face Hub first: `hf download org/m-8B --local-dir FOLDER`\n"


@pytest.fixture
def message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Submit a config with values in an empty folder; returns what is printed on standard error."""
    monkeypatch.chdir(tmp_path)
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}

    def submitted(*arguments: str, code: int = 3, **sections: dict[str, object]) -> str:
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({**CONFIG, **sections}))
        assert main(["submit", *arguments, "--dry-run"], environment) == code
        return capsys.readouterr().err

    return submitted


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"mock_data": True, "tokenizer_model": "org/m-8B"}},
        {"checkpoint": {"load": "org/m-8B"}},
        {"model": {"from": "org/m-8B"}},
    ],
)
def test_a_name_of_the_hub_is_told_to_be_downloaded(sections, message, tmp_path):
    told = message("c.yaml", **sections)
    assert f"there is no {'model in ' if 'model' in sections else ''}{tmp_path}/org/m-8B" in told
    assert told.endswith(HUB)


def test_so_is_that_of_a_flag(message):
    told = message("--hf", "org/m-8B", "--data", "x.jsonl", code=2)
    assert told.startswith("llmctl: --hf: there is no model in ") and told.endswith(HUB)


def test_so_is_it_on_another_machine(context):
    with pytest.raises(UsageError, match=r"org/m-8B is relative, .*`hf download org/m-8B --local-dir FOLDER`"):
        plan(context, "data.tokenizer_model=org/m-8B")


@pytest.mark.parametrize(
    "path", ["/org/m", "a/b/c", "org", "org/tokenizer.json", "./org/m", "~/m", "../m", "org/m.gguf"]
)
def test_a_path_is_no_name_of_the_hub(path, message):
    assert not is_hub_name(path)
    told = message("c.yaml", data={"mock_data": True, "tokenizer_model": path})
    assert "there is no" in told and "hf download" not in told


def test_a_folder_that_is_saved_to_is_no_model_of_the_hub(message):
    assert "hf download" not in message("c.yaml", code=0, checkpoint={"save": "out/m", "load": "out/m"})


@pytest.mark.parametrize("given", ["wiki", "wiki.bin", "wiki_text_document.bin", "wiki_text_document.idx"])
def test_the_prefix_that_was_meant(given, message, tmp_path):
    for ending in (".bin", ".idx"):
        (tmp_path / f"wiki_text_document{ending}").touch()
    told = message("c.yaml", data={"data_path": given})
    absent = f"{tmp_path}/{given}.bin"
    assert f"there is no {absent}; did you mean the prefix {tmp_path}/wiki_text_document?\n" in told


def test_text_in_place_of_a_dataset(message, tmp_path):
    told = message("c.yaml", data={"data_path": ["0.3", "a.jsonl", "0.7", "b"]})
    assert f"there is no {tmp_path}/a.jsonl.bin; prepare text with `llmctl data prepare` and name the prefix" in told
    assert f"there is no {tmp_path}/b.bin; name the prefix of an indexed dataset" in told
