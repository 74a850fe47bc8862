"""Flags of Megatron-LM's preprocess_data.py and merge_datasets.py work, or are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.data.commands import inspect_command, merge, preprocess
from trainer.planning.command_line import UsageError, parse_command_line

# All flags of its releases from 2020 to 2026, except those that name inputs and outputs.
WORKS = [
    *("--json-keys", "text"),
    "--append-eod",
    *("--lang", "english"),
    *("--dataset-impl", "mmap"),
    *("--workers", "2"),
    *("--partitions", "2"),
    *("--log-interval", "1000"),
    "--keep-sequential-samples",
    "--keep-newlines",
    *("--chunk-size", "25"),
    *("--vocab-size", "100"),
    *("--vocab-extra-ids", "0"),
    *("--padded-vocab-size", "128"),
    "--no-pad-vocab-size",
    "--disable-pad-vocab-size",
    *("--make-vocab-size-divisible-by", "128"),
    *("--tokenizer-type", "NullTokenizer"),
    *("--tokenizer-special-tokens", "<a>"),
    *("--tiktoken-special-tokens", "<a>"),
    *("--tiktoken-pattern", "v2"),
    *("--tiktoken-num-special-tokens", "1000"),
    "--tokenizer-sentencepiece-legacy",
    "--tokenizer-hf-use-fast",
    "--tokenizer-hf-no-use-fast",
    "--tokenizer-hf-include-special-tokens",
    "--tokenizer-hf-no-include-special-tokens",
    "--trust-remote-code",
    *("--null-tokenizer-pad-id", "-1"),
    "--use-gigatoken",
    "--legacy-tokenizer",
    "--split-sentences",
]
REFUSED = [
    (["--find-optimal-num-workers"], "the number of workers is not tuned"),
    (["--workers-to-check", "16", "32"], "the number of workers is not tuned"),
    (["--performance-dir", "d"], "the number of workers is not tuned"),
    (["--max-documents", "5"], "all documents are prepared; leave the flag out, or cut the input"),
    (["--tokenizer-metadata", "f"], "the kind of the tokenizer follows from its files"),
    (["--chat-template", "t"], "chat templates are not supported"),
    (["--null-tokenizer-eod-id", "5"], "the end-of-document id is always --vocab-size"),
    (["--no-tokenizer-sentencepiece-ignore-extra-whitespaces"], "the SentencePiece model decides"),
    (["--tokenizer-type", "SFTTokenizer"], "tokenizers of images and chats are not supported; prepare text"),
    (["--tokenizer-type", "GPT2"], "'GPT2' is not supported; the types are HuggingFaceTokenizer, "),
    (["--dataset-impl", "lazy"], "argument --dataset-impl: invalid choice: 'lazy'"),
    (["--vocab-extra-ids", "-5"], "argument --vocab-extra-ids: '-5' is not a number >= 0"),
    (["--append-eos"], "unrecognized arguments: --append-eos"),
]


def test_each_flag_of_a_script_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "1 2"}\n')
    words = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "o"), *WORKS]
    assert preprocess.main(words) == 0
    assert (tmp_path / "o_text_sentence.bin").read_bytes() == bytes([1, 0, 2, 0, 100, 0])


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_unsupported_flags_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "1 2"}\n')
    with pytest.raises(SystemExit) as ended:
        preprocess.main(["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "o"), *words])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("llmctl data prepare: ") and says in said
    assert said.splitlines()[1:] in ([], ["see llmctl data prepare --help"])
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_other_commands_give_the_same_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        merge.main(["--input", "d", "--output-prefix", "o", "--multimodal"])
    with pytest.raises(SystemExit):
        inspect_command.main(["p", "--chat-template", "t"])
    merged, inspected = capsys.readouterr().err.splitlines()
    assert merged == "llmctl data merge: --multimodal: multimodal datasets are not supported; leave the flag out"
    assert inspected == "llmctl data inspect: --chat-template: chat templates are not supported; leave the flag out"


@pytest.mark.parametrize("flag", ["padded-vocab-size", "no-pad-vocab-size", "tiktoken-special-tokens"])
def test_training_names_the_flag_to_use_instead(flag: str) -> None:
    with pytest.raises(UsageError, match=rf"--{flag}: use .*--"):
        parse_command_line([f"--{flag}"])
