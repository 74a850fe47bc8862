"""Import of GGUF files: the same logits as transformers, the tokenizer of the file, and bad input."""

from __future__ import annotations

import importlib.util
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.conversion.gguf_files import SIZES, byte_level_keys, tiny_model, write_gguf
from tests.trainer.data.vocabularies import TEXTS, make_vocabularies
from trainer.commands import checkpoint as command
from trainer.conversion.import_hub import import_hub
from trainer.conversion.verify import verify_export
from trainer.data.errors import DataError
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.model_proto import read_model_proto
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.families.format.errors import FamilyError
from trainer.families.gguf.header import GgufTensor, read_header
from trainer.families.gguf.keys import config_keys
from trainer.families.gguf.tokenizer import tokenizer_files
from trainer.hub import gguf_file
from trainer.hub.gguf_file import GgufFile

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")


def imported(path: Path, output: Path) -> Path:
    """The checkpoint of a file."""
    with GgufFile(path) as source:
        return import_hub(source, output, lambda _: None)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_the_model_that_was_written(model_type: str, tmp_path) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "hub")
    checkpoint = imported(write_gguf(tmp_path / "model.gguf", model), tmp_path / "native")
    verified = verify_export(checkpoint, tmp_path / "hub")
    assert verified.is_good and verified.witness.startswith("transformers")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_every_type_is_read_as_transformers_reads_it(kind: str, tmp_path) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "model.gguf", tiny_model("llama", tie_word_embeddings=True), kind)
    witness = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    expected = dict(witness.named_parameters())
    with GgufFile(tmp_path / "model.gguf") as source:
        for rule in source.weights.values():
            for name in rule.theirs:
                assert torch.equal(source.read_theirs(name).float(), expected[name]), name
        matrices = {source.dtype(name) for name in source.weights if len(source.shape(name)) > 1}
    assert matrices == {{"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)}


def test_the_divisors_of_llama_3_are_read_as_its_scaling(tmp_path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    model = tiny_model("llama", rope_parameters=scaling)
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors[0] == 1.0 and factors[-1] == 8.0 and 1.5 < factors[4] < 7.5
    path = write_gguf(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": factors})
    with GgufFile(path) as source:
        assert source.model.rope_scaling == {key: value for key, value in scaling.items() if key != "rope_theta"}
    path = write_gguf(tmp_path / "other.gguf", model, tensors={"rope_freqs.weight": np.linspace(1, 8, 8, dtype="f")})
    with pytest.raises(FamilyError, match=r"rope_freqs\.weight is not the scaling of Llama 3\.1"):
        GgufFile(path)


def test_scalings_with_keys_are_read() -> None:
    metadata = {"general.architecture": "llama", "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    keys = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
    keys |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 16}
    metadata |= {f"llama.{key}": value for key, value in keys.items()}
    metadata["llama.rope.scaling.original_context_length"] = 16
    found = config_keys(metadata, {"token_embd.weight": (96, 32)}, None, "model.gguf")
    assert found["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    metadata["llama.rope.scaling.type"] = "linear"
    found = config_keys(metadata, {"token_embd.weight": (96, 32)}, None, "model.gguf")
    assert found["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert found["rms_norm_eps"] == 1e-5 and found["tie_word_embeddings"] and found["num_key_value_heads"] == 2


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    """Small vocabularies of every kind."""
    return make_vocabularies(tmp_path_factory.mktemp("vocabularies"))


def byte_level(vocabularies) -> dict[str, object]:
    """Keys of the byte-level vocabulary, with a token that begins and one that ends a text."""
    return byte_level_keys(vocabularies.folder / "tokenizer.json")


def test_a_byte_level_tokenizer_is_written(vocabularies, tmp_path) -> None:
    metadata = {**byte_level(vocabularies), "tokenizer.ggml.pre": "gpt-2", "tokenizer.chat_template": "{{ messages }}"}
    size = len(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama", vocab_size=size), metadata=metadata)
    imported(path, tmp_path / "native")
    found = open_tokenizer(TokenizerSettings(tokenizer_model=str(tmp_path / "native/hugging_face")))
    expected = vocabularies.open("gpt2")
    assert [found.encode(text) for text in TEXTS] == [expected.encode(text) for text in TEXTS]
    assert found.decode([size - 2, *found.encode("It's 42.")]) == "It's 42."
    assert found.eod == size - 1
    direct = open_tokenizer(TokenizerSettings(tokenizer_model=str(path)))
    assert (direct.sha256, direct.eod, direct.specials) == (found.sha256, found.eod, found.specials)
    assert pickle.loads(pickle.dumps(direct)).encode(TEXTS[0]) == found.encode(TEXTS[0])
    with pytest.raises(DataError, match=r"tokenizer_type: is TikTokenizer, but .* holds another tokenizer"):
        open_tokenizer(TokenizerSettings("TikTokenizer", str(path)))
    settings = json.loads((tmp_path / "native/hugging_face/tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["chat_template"]) == ("<bos>", "{{ messages }}")


@pytest.mark.parametrize(
    ("pre", "words"),
    {
        "gpt-2": ["It", "'s", " ", " 123", " x"],
        "smollm": ["It", "'s", "  ", "1", "2", "3", " x"],
        "llama-bpe": ["It", "'s", " ", " ", "123", " x"],
        "qwen2": ["It", "'s", " ", " ", "1", "2", "3", " x"],
    }.items(),
)
def test_words_are_split_by_the_rule_that_the_file_names(vocabularies, pre: str, words: list[str]) -> None:
    from tokenizers import Tokenizer

    metadata = {**byte_level(vocabularies), "tokenizer.ggml.pre": pre}
    files = tokenizer_files(metadata, len(metadata["tokenizer.ggml.tokens"])).files  # type: ignore[arg-type]
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    split = tokenizer.pre_tokenizer.pre_tokenize_str("It's  123 x")
    assert [word.replace("Ġ", " ") for word, _ in split] == words
    begins = tokenizer.encode("x").tokens[0] == "<bos>"
    assert begins == (pre == "llama-bpe")


def test_a_sentencepiece_model_is_written(vocabularies, tmp_path) -> None:
    model = read_model_proto((vocabularies.folder / "bpe.model").read_bytes(), "bpe.model")
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.text for piece in model.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in model.pieces],
        "tokenizer.ggml.token_type": [piece.kind for piece in model.pieces],
        "tokenizer.ggml.remove_extra_whitespaces": model.fewer_spaces,
        "tokenizer.ggml.add_space_prefix": model.dummy_prefix,
    }
    names = ("unknown", "bos", "eos", "padding")
    metadata |= {f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(names)}
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama", vocab_size=len(model.pieces)), metadata=metadata)
    imported(path, tmp_path / "native")
    written = tmp_path / "native/hugging_face/tokenizer.model"
    read = read_model_proto(written.read_bytes(), "tokenizer.model")
    assert read.special_ids == model.special_ids == {"unk": 0, "bos": 1, "eod": 2, "pad": 3}
    found = open_tokenizer(TokenizerSettings(tokenizer_model=str(written)))
    direct = open_tokenizer(TokenizerSettings(tokenizer_model=str(path)))
    assert (direct.sha256, direct.eod, direct.specials) == (found.sha256, found.eod, found.specials)
    texts = [text for text in TEXTS if text.isascii()]
    expected = vocabularies.open("bpe")
    assert len(texts) > 20 and [found.encode(text) for text in texts] == [expected.encode(text) for text in texts]


def test_a_splitting_that_is_unknown_is_said(vocabularies, tmp_path, capsys) -> None:
    metadata = {**byte_level(vocabularies), "tokenizer.ggml.pre": "tekken"}
    size = len(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama", vocab_size=size), metadata=metadata)
    assert command.main(["import", str(path), "--output", str(tmp_path / "native")]) == 0
    assert "tokenizer.ggml.pre 'tekken' names a splitting of words that is unknown" in capsys.readouterr().err
    assert [entry.name for entry in (tmp_path / "native/hugging_face").iterdir()] == ["config.json"]
    with pytest.raises(DataError, match=r"model\.gguf: tokenizer\.ggml\.pre 'tekken' names a splitting"):
        open_tokenizer(TokenizerSettings(tokenizer_model=str(path)))


def test_the_header_is_that_which_the_package_reads(vocabularies, tmp_path) -> None:
    metadata = {**byte_level(vocabularies), "general.alignment": 64, "general.file_type": True}
    path = write_gguf(tmp_path / "model.gguf", tiny_model("qwen2"), "Q8_0", metadata=metadata)
    expected, asked = gguf.GGUFReader(path), list[tuple[int, int]]()

    def read(offset: int, limit: int) -> bytes:
        asked.append((offset, limit))
        return path.read_bytes()[offset : offset + min(limit, 4096)]

    found = read_header(str(path), read)
    fields = {name: field.contents() for name, field in expected.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata == {**fields, "qwen2.attention.layer_norm_rms_epsilon": 1e-6}
    assert found.tensors == {
        tensor.name: GgufTensor(tuple(reversed(tensor.shape.tolist())), tensor.tensor_type, tensor.data_offset)
        for tensor in expected.tensors
    }
    # In parts, and none of the weights.
    assert len(asked) > 2 and max(offset for offset, _ in asked) < expected.data_offset


@pytest.mark.parametrize(
    ("at", "content", "message"),
    [
        (4, (1).to_bytes(4, "little"), "has version 1 of GGUF; only 2 and 3"),
        (4, (3).to_bytes(4, "big"), "has version 50331648 of GGUF"),
        (16, (1 << 60).to_bytes(8, "little"), "is cut or damaged"),
        (24, (1 << 60).to_bytes(8, "little"), "is cut or damaged: it ends within a value at byte 32"),
    ],
)
def test_a_damaged_header_is_named(tmp_path, capsys, at: int, content: bytes, message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    whole = bytearray(path.read_bytes())
    whole[at : at + len(content)] = content
    path.write_bytes(whole)
    _refused(path, message, tmp_path, capsys)


def test_show_reads_a_file(tmp_path, capsys) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"), "Q8_0")
    assert command.main(["show", str(tmp_path / "model.gguf"), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "GGUF file" in shown and "Llama (model_type llama)" in shown and "21 tensors in float32" in shown
    assert "model.layers.0.mlp.up_proj.weight  " in shown and "float32  [96, 64]" in shown


BAD = {
    "another architecture": ({}, "general.architecture 'mamba' is not"),
    "experts": ({"keys": {"expert_count": 8}}, "the meaning of llama.expert_count is unknown"),
    "another width of values": ({"keys": {"attention.value_length": 8}}, "attention.value_length is 8, but heads"),
    "a scaling of rope": ({"keys": {"rope.scaling.type": "su"}}, "rope.scaling.type 'su' is unknown"),
    "a missing tensor": ({"tensors": {"output_norm.weight": None}}, "has no tensor output_norm.weight"),
    "a surplus tensor": ({"tensors": {"blk.0.extra.weight": np.ones(4, "f")}}, "holds the tensor blk.0.extra.weight"),
    "another size": ({"keys": {"feed_forward_length": 32}}, "describes "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_nothing_is_written(name: str, tmp_path, capsys) -> None:
    changes, message = BAD[name]
    path = tmp_path / "model.gguf"
    if name == "another architecture":
        writer = gguf.GGUFWriter(path, "mamba")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    else:
        write_gguf(path, tiny_model("llama"), **changes)  # type: ignore[arg-type]
    _refused(path, message, tmp_path, capsys)


def _refused(path: Path, message: str, tmp_path: Path, capsys) -> None:
    assert command.main(["import", str(path), "--output", str(tmp_path / "native")]) == 3
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.999])
def test_a_file_that_is_cut_is_named(kept: float, tmp_path, capsys) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    content = path.read_bytes()
    path.write_bytes(content[: math.floor(len(content) * kept)])
    _refused(path, "is cut or damaged", tmp_path, capsys)


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path, capsys, monkeypatch) -> None:
    def dequantize(*_: object) -> None:
        raise NotImplementedError

    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), "Q8_0")
    monkeypatch.setattr(gguf, "dequantize", dequantize)
    _refused(path, "has the type Q8_0, which the package gguf cannot dequantise", tmp_path, capsys)


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    find = importlib.util.find_spec
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None if name == "gguf" else find(name))
    _refused(path, "needs the package gguf; install it: pip install gguf", tmp_path, capsys)


def test_another_file_is_named(tmp_path, capsys) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK")
    _refused(tmp_path / "model.bin", "name a folder with a config.json, or a GGUF file", tmp_path, capsys)


def test_the_tiny_model_fills_the_blocks_of_every_type() -> None:
    assert all(SIZES[key] % 32 == 0 for key in ("vocab_size", "hidden_size", "intermediate_size"))  # type: ignore[operator]
