"""The model of a run that starts from a checkpoint or a published folder."""

import json
from pathlib import Path

import pytest

from examples.train_tokenizer import train_byte_level_bpe
from trainer.config.errors import ConfigError
from trainer.config.sections.model import ModelConfig
from trainer.families.catalogue import FAMILIES, read_model
from trainer.families.format.family import Family
from trainer.families.llama import LLAMA
from trainer.planning.build_config import build_config
from trainer.planning.start_model import LocalFiles, lay_over_start

REST = {"training": {"train_iters": 2, "seq_length": 8}, "optimizer": {"lr": 1e-3}, "data": {"mock_data": True}}


def published(folder: Path, family: Family = LLAMA, **changed) -> Path:
    keys = {"model_type": family.model_type, "architectures": [family.architecture], **family.tiny, **changed}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def native(root: Path, model: dict, iteration: int = 3, **training) -> Path:
    config = {**REST, "model": ModelConfig(**model).model_dump(mode="json")}
    config["training"] = {**REST["training"], **training}
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"config": config, "vocab_size": 101}))
    return root


def started(**sections):
    return lay_over_start({**REST, **sections}, LocalFiles())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_model_of_each_family_needs_no_key(tmp_path, family) -> None:
    folder = published(tmp_path / "model", family)
    _, expected = read_model(json.loads((folder / "config.json").read_text()), "config.json")
    found = started(checkpoint={"load": str(folder)})
    # The folder has no tensors, so also none of prediction layers.
    assert ModelConfig(**found.values["model"]) == expected.model_copy(update={"mtp_num_layers": 0})
    assert found.problems == []
    assert found.taken["model.vocab_size"] == f"{folder}/config.json"


def test_what_the_user_writes_is_laid_over_it(tmp_path) -> None:
    load = str(published(tmp_path / "model"))
    config = build_config(started(checkpoint={"load": load}, model={"hidden_dropout": 0.25, "vocab_size": None}).values)
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.25, 0.0)
    assert (config.model.vocab_size, config.model.max_position_embeddings) == (101, 64)


def test_all_keys_that_make_another_model_are_told_at_once(tmp_path) -> None:
    load = str(published(tmp_path / "model"))
    wrong = {"hidden_size": 64, "num_layers": 4, "vocab_size": 100, "norm_epsilon": 1e-5, "rotary_base": 7.0}
    found = started(checkpoint={"load": load}, model=wrong).problems
    assert [problem.key for problem in found] == [
        "model.hidden_size",
        "model.vocab_size",
        "model.norm_epsilon",
        "model.rotary_base",
    ]
    assert found[0].problem == f"is 64, but {load}/config.json has 32; remove the key"
    tuned = started(checkpoint={"load": load, "finetune": True}, model=wrong).problems
    assert [problem.key for problem in tuned] == ["model.hidden_size", "model.vocab_size"]


def test_a_shape_alone_may_be_changed(tmp_path) -> None:
    shape = str(published(tmp_path / "model"))
    found = started(model={"from": shape, "num_layers": 2})
    assert found.problems == []
    config = build_config(found.values)
    assert (config.model.num_layers, config.model.hidden_size) == (2, 32)


def test_a_shape_beside_other_weights_is_compared_with_them(tmp_path) -> None:
    shape, load = published(tmp_path / "one"), published(tmp_path / "other", num_hidden_layers=2)
    found = started(model={"from": str(shape)}, checkpoint={"load": str(load)}).problems
    assert [problem.key for problem in found] == ["model.num_layers"]


def test_the_newest_checkpoint_gives_the_model(tmp_path) -> None:
    model = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "attention_dropout": 0.0}
    native(tmp_path / "run", {**model, "num_layers": 1}, 2)
    root = native(tmp_path / "run", model, 10, seq_length=32)
    found = started(checkpoint={"load": str(root)}).values["model"]
    assert found == {**model, "vocab_size": 101, "max_position_embeddings": 32}
    numbers = {"data_path": ["x"], "tokenizer_type": "NullTokenizer"}
    assert started(checkpoint={"load": str(root)}, data=numbers).values["model"]["vocab_size"] == 100


def test_a_tokenizer_of_the_folder_is_used_where_none_is_named(tmp_path) -> None:
    folder = published(tmp_path / "model")
    load, data = {"load": str(folder)}, {"data_path": ["corpus_text_document"]}
    assert started(checkpoint=load, data=data).values["data"] == data
    (folder / "tokenizer.json").write_text("{}")
    found = started(checkpoint=load, data=data)
    assert found.values["data"]["tokenizer_model"] == str(folder)
    assert found.taken["data.tokenizer_model"] == f"{folder}/config.json"
    named = {**data, "vocab_file": "vocab.json"}
    assert started(checkpoint=load, data=named).values["data"] == named


def test_a_gguf_file_has_shape_and_tokenizer(tmp_path) -> None:
    pytest.importorskip("gguf")
    from tests.trainer.conversion.gguf_files import byte_level_keys, tiny_model, write_gguf

    path, data = tmp_path / "any name", {"data_path": ["corpus_text_document"]}
    model = write_gguf(path, tiny_model("llama"), "Q8_0")
    found = started(model={"from": str(model), "num_layers": 5}, data=data)
    shape = ModelConfig(**found.values["model"])
    assert (shape.num_layers, shape.hidden_size, shape.ffn_hidden_size, shape.num_query_groups) == (5, 64, 96, 2)
    assert (shape.vocab_size, shape.rotary_base, shape.swiglu) == (96, 500.0, True)
    assert (found.taken["model.hidden_size"], found.values["data"]) == (str(path), data)
    train_byte_level_bpe(["a text and a test of a text"] * 3, 264, tmp_path / "tokenizer.json")
    keys = byte_level_keys(tmp_path / "tokenizer.json")
    size = len(keys["tokenizer.ggml.tokens"])
    write_gguf(path, tiny_model("llama", vocab_size=size), metadata={**keys, "tokenizer.ggml.pre": "gpt-2"})
    found = started(checkpoint={"load": str(path)}, data=data, model={"hidden_size": 32})
    assert (found.values["data"]["tokenizer_model"], found.values["model"]["vocab_size"]) == (str(path), size)
    assert [problem.key for problem in found.problems] == ["model.hidden_size"]
    write_gguf(path, tiny_model("llama", vocab_size=size), metadata={**keys, "tokenizer.ggml.pre": "tekken"})
    assert started(checkpoint={"load": str(path)}, data=data).problems == []
    [problem] = started(checkpoint={"load": str(path)}, data={**data, "tokenizer_model": str(path)}).problems
    assert problem.key == "data.tokenizer_model"
    assert problem.problem.startswith(f"{path}: tokenizer.ggml.pre 'tekken' names a splitting of words that is unknown")


def test_prediction_layers_count_if_the_files_have_them(tmp_path) -> None:
    family = next(family for family in FAMILIES if family.name == "DeepSeek-V3")
    folder = published(tmp_path / "model", family, num_nextn_predict_layers=1)
    layers = family.tiny["num_hidden_layers"]
    names = {f"model.layers.{layers}.eh_proj.weight": "model-1.safetensors"}
    assert not started(checkpoint={"load": str(folder)}).values["model"].get("mtp_num_layers")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert started(checkpoint={"load": str(folder)}).values["model"]["mtp_num_layers"] == 1
    (folder / "model.safetensors.index.json").unlink()
    header = json.dumps(names).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"data")
    assert started(checkpoint={"load": str(folder)}).values["model"]["mtp_num_layers"] == 1


@pytest.mark.parametrize(
    ("files", "sections", "key", "words"),
    [
        ({}, {"checkpoint": {"load": "@"}}, "checkpoint.load", "there is no model in @ to take the section model from"),
        ({}, {"model": {"from": "@"}}, "model.from", "there is no model in @"),
        ({}, {"model": {"from": 5}}, "model.from", "5 is not a path"),
        ({}, {"checkpoint": {"load": "@/m.gguf"}}, "checkpoint.load", "there is no model in @/m.gguf to take"),
        ({"m.gguf": "GGUF"}, {"checkpoint": {"load": "@/m.gguf"}}, "checkpoint.load", "@/m.gguf: is cut or damaged"),
        ({"config.json": "{"}, {"model": {"from": "@"}}, "model.from", "there is no model in @"),
        (
            {"config.json": '{"model_type": "fancy"}'},
            {"checkpoint": {"load": "@"}},
            "checkpoint.load",
            "@/config.json: model_type 'fancy' is not a family known here",
        ),
        (
            {"iter_0000001/metadata.json": "{}"},
            {"checkpoint": {"load": "@"}},
            "checkpoint.load",
            "@/iter_0000001/metadata.json: has no model section",
        ),
        (
            {"iter_0000001/metadata.json": "[]"},
            {"checkpoint": {"load": "@"}},
            "checkpoint.load",
            "@/iter_0000001/metadata.json: is damaged",
        ),
    ],
)
def test_a_folder_without_a_model_is_refused(tmp_path, files, sections, key, words) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    filled = json.loads(json.dumps(sections).replace("@", str(tmp_path)))
    with pytest.raises(ConfigError) as refused:
        started(**filled)
    assert refused.value.key == key
    assert refused.value.problem.startswith(words.replace("@", str(tmp_path)))


def test_a_first_start_needs_its_own_section(tmp_path) -> None:
    # Megatron's scripts name one folder for load and save, which is empty at the first start.
    model = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    found = started(checkpoint={"load": str(tmp_path), "save": str(tmp_path)}, model=model)
    assert (found.values["model"], found.taken, found.problems) == (model, {}, [])
