"""Damaged data and tokenizers are refused before the queue, in a dry run too."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.train_tokenizer import train_byte_level_bpe
from llmctl.cli.main import main
from tests.trainer.data import token_files
from trainer.data.commands.preprocess import main as prepare

MODEL = {
    "model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4},
    "training": {"train_iters": 2, "seq_length": 16, "micro_batch_size": 1, "device": "cpu"},
    "optimizer": {"lr": 1e-3},
}
TEXT = "The preflight opens every file that this machine has before anything is queued. "
VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, and 200 documents of text that ``llmctl data prepare`` has made data from."""
    folder = tmp_path_factory.mktemp("prepared")
    train_byte_level_bpe([TEXT], VOCAB_SIZE, folder / "tokenizer.json")
    with (folder / "text.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": f"{TEXT} {number}"}) + "\n" for number in range(200))
    named = ["--input", str(folder / "text.jsonl"), "--output-prefix", str(folder / "d")]
    assert prepare([*named, "--tokenizer-model", str(folder / "tokenizer.json"), "--workers", "1"]) == 0
    return folder


@pytest.fixture
def data(prepared: Path, home: Path) -> Path:
    """A copy of ``prepared`` in the home of a user; it is the working directory."""
    return Path(shutil.copytree(prepared, home, dirs_exist_ok=True))


Submit = Callable[..., tuple[int, str]]


@pytest.fixture
def submit(data: Path, capsys: pytest.CaptureFixture[str]) -> Submit:
    """A dry run of a config with these sections; returns exit code and messages."""

    def run(*arguments: str, **sections: Any) -> tuple[int, str]:
        named = {"data_path": ["d_text_document"], "tokenizer_model": "tokenizer.json"}
        (data / "c.yaml").write_text(yaml.safe_dump({**MODEL, "data": named, **sections}))
        code = main(["submit", "--cluster", "local", "--dry-run", *arguments, "c.yaml"])
        return code, capsys.readouterr().err

    return run


def test_sound_files_pass(submit: Submit) -> None:
    code, told = submit()
    assert code == 0, told
    assert "split" not in told


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_a_damaged_index_is_told_with_both_sizes(data: Path, submit: Submit) -> None:
    index = data / "d_text_document.idx"
    whole = index.read_bytes()
    for size, words in (
        (0, "is not a Megatron-LM index (it starts with b'')"),
        (30, "is truncated within its header, at 30 bytes; prepare the data again"),
        (900, f"has 900 bytes, but 200 sequences and 201 document entries need {len(whole):,}"),
    ):
        index.write_bytes(whole[:size])
        code, told = submit()
        assert (code, told.count("\n")) == (3, 1)
        assert f"c.yaml: data.data_path: {index}: {words}" in told


def test_a_cut_or_longer_bin_is_told_with_both_sizes(data: Path, submit: Submit) -> None:
    path = data / "d_text_document.bin"
    whole = path.read_bytes()
    for content, words in (
        (
            whole[: len(whole) // 4 * 2],
            f"has {len(whole) // 4 * 2:,} bytes, but d_text_document.idx lists {len(whole):,}",
        ),
        (whole + b"\0\0", f"has {len(whole) + 2:,} bytes, but d_text_document.idx lists {len(whole):,}"),
        (whole[:-1], "is not a multiple of the token size 2"),
    ):
        path.write_bytes(content)
        code, told = submit()
        assert code == 3
        assert words in told
        assert "prepare the data again" in told


def test_a_manifest_of_other_data_is_told(data: Path, submit: Submit) -> None:
    path = data / "d_text_document.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "documents": 7}))
    code, told = submit()
    assert code == 3
    assert f"{path}: states 7 documents (there are 200): the manifest belongs to other data; remove it" in told
    path.write_text("{")
    assert "cannot be read as a manifest" in submit()[1]
    path.unlink()
    assert submit()[0] == 0


def test_all_problems_come_together(data: Path, submit: Submit) -> None:
    cut(data / "d_text_document.idx", 30)
    token_files.write(data / "other", [[1] * 40] * 3)
    cut(data / "other.bin", 20)
    (data / "tokenizer.json").write_text("{}")
    named = {"data_path": ["d_text_document", "other"], "tokenizer_model": "tokenizer.json"}
    code, told = submit("--nodes", "100000", data=named)
    assert code == 2
    assert "above 1024" in told
    assert [line.partition(":")[0] for line in told.splitlines()] == ["llmctl", "also", "also", "also"]
    assert "d_text_document.idx: is truncated" in told
    assert "other.bin: has 20 bytes, but other.idx lists 240" in told
    assert "tokenizer.json: is not a valid tokenizer.json" in told


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "is not a valid tokenizer.json: it has no model; name a tokenizer.json or its folder"),
        ('{"model": {"vocab": {"a"', "is not a valid tokenizer.json: Expecting ':' delimiter"),
        ("", "is empty; name a tokenizer.json or its folder"),
        ("<html>", "is not a valid tokenizer.json: Expecting value"),
    ],
)
def test_a_file_that_is_not_a_tokenizer_is_told(data: Path, submit: Submit, content: str, words: str) -> None:
    (data / "tokenizer.json").write_text(content)
    code, told = submit()
    assert code == 3
    assert f"c.yaml: data.tokenizer_model: {data}/tokenizer.json: {words}" in told
    folder = {"data_path": ["d_text_document"], "tokenizer_model": "."}
    assert f"{data}/tokenizer.json: {words}" in submit(data=folder)[1]


def test_another_tokenizer_than_the_datas_is_told_with_both_sizes(data: Path, submit: Submit) -> None:
    train_byte_level_bpe([TEXT], 280, data / "tokenizer.json")
    code, told = submit()
    assert code == 3
    assert (
        f"data.tokenizer_model: {data}/tokenizer.json has 280 tokens, but {data}/d_text_document was tokenized with "
        f"another tokenizer, of {VOCAB_SIZE} tokens; name the data's tokenizer, or prepare the data again" in told
    )


def test_tokens_that_the_config_adds_are_no_other_tokenizer(submit: Submit) -> None:
    named = {"data_path": ["d_text_document"], "tokenizer_model": "tokenizer.json", "vocab_extra_ids": 3}
    assert submit(data=named)[0] == 0


def test_a_table_that_is_too_small_for_the_data_is_told(submit: Submit) -> None:
    code, told = submit("--set", "model.vocab_size=200")
    assert code == 2
    assert f"--set model.vocab_size: 200 is too small for the tokenizer of the data; use {VOCAB_SIZE}" in told
    assert submit("--set", f"model.vocab_size={VOCAB_SIZE}")[0] == 0


def test_an_empty_train_split_is_refused(data: Path, submit: Submit) -> None:
    token_files.write(data / "few", [[1] * 10])
    code, told = submit(data={"data_path": ["few"]}, model={**MODEL["model"], "vocab_size": 1000})
    assert code == 3
    assert f"data.data_path: the train split of {data}/few has 10 tokens, but one sample needs 17" in told
    token_files.write(data / "few", [[1] * 17])
    assert submit(data={"data_path": ["few"]}, model={**MODEL["model"], "vocab_size": 1000})[0] == 0


def test_an_empty_valid_split_is_told_in_a_dry_run(data: Path, submit: Submit) -> None:
    token_files.write(data / "few", [[1] * 30] * 12)
    model = {**MODEL["model"], "vocab_size": 1000}
    code, told = submit(data={"data_path": ["few"]}, model=model)
    assert code == 0
    assert f"no evaluation during training: the valid split of {data}/few has no document: 12 documents" in told
    code, told = submit(data={"data_path": ["few"], "split": "95,5,0"}, model=model)
    assert code == 0
    token_files.write(data / "few", [[1] * 30] * 11 + [[1] * 3])
    code, told = submit(data={"data_path": ["few"], "split": "92,8,0"}, model=model)
    assert code == 3
    assert f"the valid split of {data}/few has 3 tokens, but one sample needs 17; raise its share in data.split" in told
    assert submit("--set", "training.eval_iters=0", data={"data_path": ["few"], "split": "92,8,0"}, model=model)[0] == 0


def test_a_vocabulary_may_have_any_word_as_token(data: Path, submit: Submit) -> None:
    """GPT-2 has a token called model, which is also the name of a part of a tokenizer.json."""
    vocabulary = json.loads((data / "tokenizer.json").read_text())["model"]["vocab"]
    for word in ("model", "config"):
        vocabulary[word] = len(vocabulary)
    (data / "vocab.json").write_text(json.dumps(vocabulary))
    (data / "merges.txt").write_text("#version: 0.2\n")
    named = {"data_path": ["d_text_document"], "vocab_file": "vocab.json", "merge_file": "merges.txt"}
    code, told = submit(data=named)
    assert code == 0, told
    code, told = submit("--set", f"model.vocab_size={len(vocabulary) - 1}", data=named)
    assert code == 2 and f"too small for the tokenizer of the data; use {len(vocabulary)}" in told


def test_masked_models_need_a_known_case_and_sentinels(data: Path, submit: Submit) -> None:
    (data / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]) + "\n")
    t5 = {"architecture": "t5", "position_embedding_type": "relative", "disable_bias_linear": True}
    model = {**MODEL["model"], **t5}
    training = {**MODEL["training"], "decoder_seq_length": 16}
    named: dict[str, Any] = {"data_path": ["d_text_document"], "vocab_file": "vocab.txt"}
    code, told = submit(model=model, training=training, data=named)
    assert code == 3
    assert "vocab.txt: its folder has no tokenizer_config.json with do_lower_case; set data.tokenizer_type to" in told
    assert "data.vocab_extra_ids: is 0, but " in told and "has no sentinels (<extra_id_0>, ...)" in told
    named |= {"tokenizer_type": "BertWordPieceLowerCase", "vocab_extra_ids": 100}
    told = submit(model=model, training=training, data=named)[1]
    assert "do_lower_case" not in told and "sentinels" not in told
    (data / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    told = submit(model=model, training=training, data={**named, "tokenizer_type": None})[1]
    assert "do_lower_case" not in told
    bert = {**MODEL["model"], "architecture": "bert"}
    assert "sentinels" not in submit(model=bert, data={**named, "vocab_extra_ids": 0})[1]


def test_a_small_table_is_not_said_to_be_that_of_a_folder_to_save_in(submit: Submit) -> None:
    small = {**MODEL["model"], "vocab_size": VOCAB_SIZE - 1}
    told = submit(model=small, checkpoint={"save": "ck", "load": "ck"})[1]
    assert f"model.vocab_size: {VOCAB_SIZE - 1} is too small for the tokenizer of the data; use {VOCAB_SIZE}" in told
