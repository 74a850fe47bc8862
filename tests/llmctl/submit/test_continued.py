"""``llmctl submit --hf FOLDER --data TEXT``: a published model, trained further on text, in one line."""

import json
from pathlib import Path

import pytest

from examples.train_tokenizer import train_byte_level_bpe
from llmctl.cli.main import main
from llmctl.runs.record import RunRecord
from tests.llmctl.run_directories import TRANSPORT
from tests.llmctl.submit.test_submit import ending, place
from tests.trainer.families.published_models import published
from trainer.families.llama import LLAMA

__all__ = ["place"]

LINE = ["--hf", "my model", "--data", "text.txt", "--set"]
PARAGRAPHS = [f"Paragraph {number} counts to {number + 1} and then says nothing more." for number in range(400)]


@pytest.fixture
def work(place) -> Path:
    """A working directory with a tiny published model, its tokenizer, and a text."""
    work = place / "work"
    published(LLAMA, vocab_size=300, max_position_embeddings=256).save_pretrained(work / "my model")
    train_byte_level_bpe(PARAGRAPHS, 300, work / "my model" / "tokenizer.json")
    (work / "text.txt").write_text("\n\n".join(PARAGRAPHS))
    return work


def config_of(place: Path, run_id: str) -> dict:
    return RunRecord.load(place / "runs" / run_id, TRANSPORT).config


def test_one_line_trains_and_leaves_a_published_folder(work, place, capsys) -> None:
    (work / "more.jsonl").write_text(json.dumps({"text": PARAGRAPHS[0]}))
    few = ["--set", "training.train_iters=2", "--set", "training.device=cpu"]
    assert main(["submit", "--run-id", "r", "--hf", "my model", "--data", "text.txt", "more.jsonl", *few]) == 0
    told = capsys.readouterr().err
    assert f"the model is that of {work}/my model/config.json" in told
    assert "2 iterations of 8 samples of 128 tokens" in told
    assert ending(place, "r")["code"] == 0, (place / "runs/r/job.log").read_text()
    config = config_of(place, "r")
    assert config["data"]["data_path"] == [f"{work}/text.txt", f"{work}/more.jsonl"]
    assert config["model"]["attention_dropout"] == 0.0
    assert RunRecord.load(place / "runs/r", TRANSPORT).name == "my-model"
    written = json.loads((place / "runs/r/checkpoints/iter_0000002_hugging_face/config.json").read_text())
    assert (written["model_type"], written["max_position_embeddings"]) == ("llama", 256)


def test_a_gguf_file_trains_as_it_is(work, place, capsys) -> None:
    pytest.importorskip("gguf")
    from tests.trainer.conversion.gguf_files import byte_level_keys, tiny_model, write_gguf

    keys = {**byte_level_keys(work / "my model" / "tokenizer.json"), "tokenizer.ggml.pre": "gpt-2"}
    model = tiny_model("llama", vocab_size=len(keys["tokenizer.ggml.tokens"]), max_position_embeddings=256)
    write_gguf(work / "m.gguf", model, "Q8_0", metadata=keys)
    few = ["--set", "training.train_iters=2", "--set", "training.device=cpu", "--nodes", "2"]
    few += ["--set", "parallel.tensor_model_parallel_size=2"]
    assert main(["submit", "--run-id", "r", "--hf", "m.gguf", "--data", "text.txt", *few]) == 0
    assert f"the model is that of {work}/m.gguf" in capsys.readouterr().err
    assert ending(place, "r")["code"] == 0, (place / "runs/r/job.log").read_text()
    assert config_of(place, "r")["data"]["tokenizer_model"] == f"{work}/m.gguf"
    written = place / "runs/r/checkpoints/iter_0000002_hugging_face"
    assert json.loads((written / "config.json").read_text())["vocab_size"] == len(keys["tokenizer.ggml.tokens"])
    assert (written / "tokenizer.json").is_file()
    assert main(["init", "--from", "m.gguf", "-o", "new.yaml"]) == 0
    short = ["--set", "training.seq_length=64", "--set", "data.streaming=true", "--set", "data.data_path=text.txt"]
    assert main(["submit", "--show-script", "new.yaml", *short]) == 0


def test_one_pass_over_the_text_is_the_default_and_flags_win(work, place, capsys) -> None:
    (work / "long.txt").write_text("word " * 400_000)
    line = ["submit", "--show-script", "--hf", "my model", "--data", "long.txt"]
    assert main(line) == 0
    assert "about 500,000 tokens of text: 244 iterations of 8 samples of 256 tokens" in capsys.readouterr().err
    assert main([*line, "--set", "training.seq_length=64", "--set", "training.global_batch_size=100"]) == 0
    assert "78 iterations of 100 samples of 64 tokens" in capsys.readouterr().err
    assert list(place.glob("runs/*/run.json")) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["--hf", "my model"], "--hf: also give --data TEXT"),
        (["--data", "text.txt"], "--data: also give --hf FOLDER"),
        (["--hf", "my model", "--data", "none.txt"], "none.txt is not a file that can be read"),
        (["--hf", "my model", "--data", "text.txt", "--", "ls"], "--hf: takes the place of CONFIG, COMMAND"),
        (["--hf", "nowhere", "--data", "text.txt"], "--hf: there is no model in "),
        (
            ["--hf", "my model", "--data", "text.txt", "--set", "model.hidden_size=8"],
            "--set model.hidden_size: is 8, but",
        ),
        (
            ["c.yaml", "--hf", "my model", "--data", "text.txt"],
            "--data: c.yaml is not text; --hf takes the place of CONFIG",
        ),
        (["--hf", "my model", "--data", ""], "--data: is empty"),
        (["--hf", "", "--data", "text.txt"], "--data: also give --hf FOLDER"),
        ([*LINE, "training=5"], "--set training: 5 is not valid"),
        ([*LINE, "data=5"], "--set data: 5 is not valid"),
        ([*LINE, "model=5"], "--set model: 5 is not valid"),
        ([*LINE, "checkpoint=5"], "--set checkpoint: 5 is not valid"),
        ([*LINE, "training.global_batch_size=0"], "--set training.global_batch_size: 0 is not valid"),
        ([*LINE, "training.seq_length=0"], "--set training.seq_length: 0 is not valid"),
        (["c.yaml", "d.yaml"], "d.yaml: is one word too many"),
    ],
)
def test_a_wrong_line_is_told(work, capsys, line, says) -> None:
    assert main(["submit", "--show-script", *line]) == 2
    assert says in capsys.readouterr().err
    assert work.is_dir()
