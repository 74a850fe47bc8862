"""Folders as people publish them, and as they are damaged: read, or refused in one sentence that says what to do."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import save as save_distributed

from tests.trainer.families.published_models import published
from trainer.commands import checkpoint as command
from trainer.commands import generate
from trainer.conversion import file_plan
from trainer.conversion.verify import verify_export
from trainer.families.bert import BERT
from trainer.families.dense.granite import DENSE_GRANITE4
from trainer.families.dense.ministral import MINISTRAL3
from trainer.families.format.family import Family
from trainer.families.gemma3 import GEMMA3
from trainer.families.llama import INTERNLM3, LLAMA
from trainer.families.mistral import MISTRAL
from trainer.families.mixtral import MIXTRAL
from trainer.families.qwen3 import QWEN3
from trainer.families.t5 import MT5, T5
from trainer.hub.tensor_file import TensorFile

pytest.importorskip("transformers")

SINGLE, TORCH = "model.safetensors", "pytorch_model.bin"


def saved(family: Family, folder: Path, **changes: Any) -> Path:
    """The family's tiny model as transformers saves it."""
    published(family, **changes).save_pretrained(folder)
    return folder


def imported(folder: Path, root: Path) -> Path:
    """The checkpoint of a folder, which must be read."""
    assert command.main(["import", str(folder), "--output", str(root / "native")]) == 0
    return root / "native/iter_0000000"


def refusal(folder: Path, root: Path, capsys) -> str:
    """The one line with which the folder is refused."""
    capsys.readouterr()
    assert command.main(["import", str(folder), "--output", str(root / "native")]) == 3
    error: str = capsys.readouterr().err
    assert error.count("\n") == 1 and not (root / "native").exists()
    return error


def keys_of(folder: Path) -> dict[str, Any]:
    """Content of config.json."""
    keys: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return keys


def to_torch(folder: Path, *, shards: int = 1, is_old: bool = False) -> None:
    """Write the weights as torch.save does, in place of safetensors."""
    weights = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(weights)
    files = [f"pytorch_model-{n + 1:05d}-of-{shards:05d}.bin" if shards > 1 else TORCH for n in range(shards)]
    for number, file in enumerate(files):
        part = {name: weights[name] for name in names[number::shards]}
        torch.save(part, folder / file, _use_new_zipfile_serialization=not is_old)
    if shards > 1:
        places = {name: files[number % shards] for number, name in enumerate(names)}
        (folder / f"{TORCH}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("form", [{}, {"shards": 3}, {"is_old": True}], ids=["one file", "shards", "before torch 1.6"])
def test_weights_of_torch_save_are_read(tmp_path, form: dict[str, Any]) -> None:
    folder = saved(QWEN3, tmp_path / "hub")
    weights = load_file(folder / SINGLE)
    to_torch(folder, **form)
    imported(folder, tmp_path)
    assert command.main(["export", str(tmp_path / "native"), "--output", str(tmp_path / "again")]) == 0
    again = load_file(tmp_path / "again" / SINGLE)
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)


def test_experts_of_torch_save_are_read(tmp_path) -> None:
    folder = saved(MIXTRAL, tmp_path / "hub")
    to_torch(folder, shards=2)
    assert verify_export(imported(folder, tmp_path), folder).is_good


class Harm:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path):
        """Name the file."""
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Any, ...]]:
        """The function that unpickling would call, with its arguments."""
        return (Path.touch, (self.path,))


def test_a_pickle_cannot_run_code(tmp_path, capsys) -> None:
    folder = saved(LLAMA, tmp_path / "hub")
    (folder / SINGLE).unlink()
    torch.save({"model.norm.weight": Harm(tmp_path / "harmed")}, folder / TORCH)
    assert f"{TORCH}: is cut or damaged, or holds more than tensors" in refusal(folder, tmp_path, capsys)
    (folder / TORCH).write_bytes(pickle.dumps({"model.norm.weight": Harm(tmp_path / "harmed")}))
    refusal(folder, tmp_path, capsys)
    assert not (tmp_path / "harmed").exists()


def test_a_cut_file_of_torch_save_is_named(tmp_path, capsys) -> None:
    folder = saved(LLAMA, tmp_path / "hub")
    to_torch(folder)
    content = (folder / TORCH).read_bytes()
    (folder / TORCH).write_bytes(content[: len(content) // 2])
    assert f"{TORCH}: is cut or damaged" in refusal(folder, tmp_path, capsys)
    torch.save({"state_dict": {}}, folder / TORCH)
    assert f"{TORCH}: is not a table of tensors by name" in refusal(folder, tmp_path, capsys)


OTHERS = {
    "tf_model.h5": "tf_model.h5 is for TensorFlow",
    "flax_model.msgpack": "flax_model.msgpack is for Flax",
    "consolidated.00.pth": "consolidated.00.pth is in the format of the model's own code",
    "adapter_model.safetensors": "adapter_model.safetensors is an adapter (LoRA); merge it",
    "__0_0.distcp": "__0_0.distcp is of torch.distributed.checkpoint",
}


@pytest.mark.parametrize("name", OTHERS)
def test_weights_in_another_format_are_named(tmp_path, capsys, name: str) -> None:
    folder = saved(LLAMA, tmp_path / "hub")
    (folder / SINGLE).rename(folder / name)
    error = refusal(folder, tmp_path, capsys)
    assert f"{SINGLE}: is missing, although config.json is there; {OTHERS[name]}" in error


def test_old_names_of_norms_are_read(tmp_path) -> None:
    """As in bert-base-uncased."""
    folder = saved(BERT, tmp_path / "hub")
    weights = load_file(folder / SINGLE)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }
    assert old.keys() != weights.keys()
    save_file(old, folder / SINGLE, {"format": "pt"})
    assert verify_export(imported(folder, tmp_path), folder).is_good


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_weights_that_are_not_numbers_are_named(tmp_path, capsys, value: float) -> None:
    folder = saved(LLAMA, tmp_path / "hub")
    weights = load_file(folder / SINGLE)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 4] = value
    save_file(weights, folder / SINGLE, {"format": "pt"})
    assert command.main(["import", str(folder), "--output", str(tmp_path / "native")]) == 3
    assert f"{SINGLE}: {name} holds NaN or infinite elements" in capsys.readouterr().err
    assert not (tmp_path / "native/iter_0000000").exists()


def test_a_checkpoint_is_not_imported_again(tmp_path, capsys) -> None:
    checkpoint = imported(saved(LLAMA, tmp_path / "hub"), tmp_path)
    capsys.readouterr()
    for source in (checkpoint, checkpoint.parent):
        assert command.main(["import", str(source), "--output", str(tmp_path / "other")]) == 3
        assert f"{source}: is a checkpoint of this trainer already" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_folder_without_config_is_named(tmp_path, capsys) -> None:
    (tmp_path / "hub").mkdir()
    assert "config.json: is missing; name a folder in Hugging Face's format" in refusal(
        tmp_path / "hub", tmp_path, capsys
    )


def test_a_distributed_checkpoint_of_another_program_is_named(tmp_path, capsys) -> None:
    save_distributed({"model.norm.weight": torch.ones(4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "is a checkpoint of torch.distributed.checkpoint (DCP), but has no tensor" in refusal(
        tmp_path / "dcp", tmp_path, capsys
    )
    assert command.main(["show", str(tmp_path / "dcp")]) == 3
    assert "torch.distributed.checkpoint (DCP)" in capsys.readouterr().err


def test_an_interrupted_import_is_named_with_the_way_on(tmp_path, capsys, monkeypatch) -> None:
    folder = saved(LLAMA, tmp_path / "hub")

    class Stopped(TensorFile):
        """Is interrupted before its first tensor."""

        def write(self, _: torch.Tensor) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(file_plan, "TensorFile", Stopped)
    with pytest.raises(KeyboardInterrupt):
        imported(folder, tmp_path)
    capsys.readouterr()
    native = tmp_path / "native"
    way = f"an import of {folder} that is not finished; go on with it: llmctl checkpoint import {folder} --output"
    assert command.main(["show", str(native)]) == 3
    assert f"{native}: holds {way} {native}" in capsys.readouterr().err
    assert generate.main(["--checkpoint", str(native), "--prompt", "x"], {}) == 3
    assert way in capsys.readouterr().err


def test_experts_of_any_width_are_compared(tmp_path) -> None:
    """The grouped product of experts in transformers wants widths that divide by 8."""
    sizes = {"hidden_size": 90, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 18}
    folder = saved(MIXTRAL, tmp_path / "hub", **sizes, intermediate_size=50)
    imported(folder, tmp_path)
    assert command.main(["export", str(tmp_path / "native"), "--output", str(tmp_path / "again")]) == 0


def test_a_t5_that_transformers_itself_has_built_is_read(tmp_path, capsys) -> None:
    """transformers 5 ties every T5 that it has not read from a file, and saves no output table."""
    import transformers

    config = transformers.T5Config(**T5.tiny)
    torch.manual_seed(5)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "hub")
    assert "lm_head.weight" not in load_file(tmp_path / "hub" / SINGLE)
    checkpoint = imported(tmp_path / "hub", tmp_path)
    assert "holds no lm_head.weight, and transformers takes shared.weight in its place" in capsys.readouterr().err
    assert verify_export(checkpoint, tmp_path / "hub").is_good
    assert command.main(["export", str(tmp_path / "native"), "--output", str(tmp_path / "again")]) == 0


@pytest.fixture(scope="module")
def whole_gemma(tmp_path_factory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A tiny Gemma 3 with its part for images as transformers saves it, token ids, and their logits."""
    import transformers

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config={"model_type": "gemma3_text", **GEMMA3.tiny, "vocab_size": 128},
        vision_config={"model_type": "siglip_vision_model", **vision},
        mm_tokens_per_image=4,
        image_token_index=120,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    folder: Path = tmp_path_factory.mktemp("gemma") / "hub"
    model.save_pretrained(folder)
    tokens = torch.arange(2, 34)[None]
    with torch.no_grad():
        return folder, tokens, model(tokens).logits


@pytest.mark.parametrize("form", ["of now", "as published"])
def test_the_text_model_of_gemma_3_is_read_alone(whole_gemma, tmp_path, capsys, form: str) -> None:
    import transformers

    saved_as, tokens, expected = whole_gemma
    folder = Path(shutil.copytree(saved_as, tmp_path / "hub"))
    weights = load_file(folder / SINGLE)
    if form == "as published":
        olds = {"model.language_model.": "language_model.model.", "model.vision": "vision", "model.multi": "multi"}
        for new, old in olds.items():
            weights = {name.replace(new, old): tensor for name, tensor in weights.items()}
        keys = keys_of(folder)
        # The file of google/gemma-3-4b-it has few keys of the text model; the class has the others.
        keys["text_config"].pop("attention_bias")
        (folder / "config.json").write_text(json.dumps(keys))
    save_file(weights, folder / SINGLE, {"format": "pt"})
    others = sum("vision" in name or "multi_modal" in name for name in weights)
    assert others > 10
    checkpoint = imported(folder, tmp_path)
    assert f"a part for images, of which {others} tensors are left out" in capsys.readouterr().err
    assert verify_export(checkpoint, saved_as).is_good
    assert command.main(["export", str(tmp_path / "native"), "--output", str(tmp_path / "again")]) == 0
    exported = keys_of(tmp_path / "again")
    assert exported["model_type"] == "gemma3_text" and not {"text_config", "vision_config"} & exported.keys()
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    with torch.no_grad():
        assert (alone(tokens).logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("text", [MISTRAL, MINISTRAL3], ids=lambda family: family.name)
def test_the_text_model_of_mistral_small_and_ministral_3_is_read_alone(tmp_path, capsys, text: Family) -> None:
    import transformers

    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}
    keys = {"model_type": text.model_type, **text.tiny, "vocab_size": 128}
    config = transformers.Mistral3Config(text_config=keys, vision_config=vision, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "hub")
    tokens = torch.arange(2, 34)[None]
    with torch.no_grad():
        expected = model(tokens).logits
    checkpoint = imported(tmp_path / "hub", tmp_path)
    told = capsys.readouterr().err
    assert "a part for images" in told and "were not compared" not in told
    assert verify_export(checkpoint, tmp_path / "hub").is_good
    assert command.main(["export", str(tmp_path / "native"), "--output", str(tmp_path / "again")]) == 0
    assert keys_of(tmp_path / "again")["model_type"] == text.model_type
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    with torch.no_grad():
        assert (alone(tokens).logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("family", "exported"),
    [(INTERNLM3, "llama"), (DENSE_GRANITE4, "granite"), (MT5, "t5")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_family_under_another_name_is_exported_under_the_first(tmp_path, capsys, family: Family, exported) -> None:
    checkpoint = imported(saved(family, tmp_path / "hub"), tmp_path)
    assert "were not compared" not in capsys.readouterr().err
    assert verify_export(checkpoint, tmp_path / "hub").is_good
    assert command.main(["export", str(tmp_path / "native"), "--output", str(tmp_path / "again")]) == 0
    assert keys_of(tmp_path / "again")["model_type"] == exported
    # No key of the other name is left, which the reader would refuse.
    assert command.main(["import", str(tmp_path / "again"), "--output", str(tmp_path / "once more")]) == 0


WRONG = {"num_hidden_layers": ["five", -1, 1e9, 10**9], "hidden_size": [90.5], "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_value_of_a_wrong_type_is_named(tmp_path, capsys, key: str, value: Any) -> None:
    folder = saved(LLAMA, tmp_path / "hub")
    (folder / "config.json").write_text(json.dumps(keys_of(folder) | {key: value}))
    assert f"{folder / 'config.json'}: {key} is {value!r}; use" in refusal(folder, tmp_path, capsys)
