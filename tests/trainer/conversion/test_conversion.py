"""Import and export of Hugging Face folders: the same bits both ways, and bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.families.proofs import record
from tests.trainer.families.published_models import published
from trainer.checkpoint.checksums import checksum_of_metadata
from trainer.checkpoint.directory import CheckpointError
from trainer.commands import checkpoint as command
from trainer.conversion import file_plan
from trainer.conversion.export_hub import Export, export_hub
from trainer.conversion.import_hub import import_hub
from trainer.conversion.verify import verify_export
from trainer.families.catalogue import FAMILIES
from trainer.families.format.family import Family
from trainer.hub.errors import HubError
from trainer.hub.folder import HubFolder
from trainer.hub.tensor_file import TensorFile

pytest.importorskip("transformers")

SHARD_BYTES = 20_000


def ignore(_: int) -> None:
    """Reports no progress."""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def imported(folder: Path, output: Path) -> Path:
    """The checkpoint of a folder."""
    with HubFolder(folder) as source:
        return import_hub(source, output, ignore)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A tiny Llama in bfloat16."""
    folder = tmp_path_factory.mktemp("llama") / "hub"
    family = next(family for family in FAMILIES if family.model_type == "llama")
    published(family).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def copy_of_llama(llama, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(llama, tmp_path / "hub"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_export_has_the_bits_of_its_import(family: Family, tmp_path) -> None:
    published(family).to(torch.bfloat16).save_pretrained(tmp_path / "hub")
    checkpoint = imported(tmp_path / "hub", tmp_path / "native")
    count = export_hub(Export.open(checkpoint), tmp_path / "again", ignore, SHARD_BYTES)
    before, after = tensors_of(tmp_path / "hub"), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys() and count == len(before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    index = json.loads((tmp_path / "again/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    verified = verify_export(checkpoint, tmp_path / "again")
    assert verified.is_good and verified.witness.startswith("transformers")
    record(family.name, "bits")


def test_an_export_that_differs_is_found(llama, tmp_path, capsys) -> None:
    imported(llama, tmp_path / "native")
    changed = Path(shutil.copytree(llama, tmp_path / "changed"))
    weights = tensors_of(changed)
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1.0
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    assert command.main(["verify", str(tmp_path / "native"), "--against", str(changed)]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("written_first", [0, 1, 3])
def test_an_interrupted_import_is_continued(llama, tmp_path, monkeypatch, written_first: int) -> None:
    monkeypatch.setattr("trainer.conversion.imported_checkpoint.MAX_BYTES_PER_FILE", SHARD_BYTES)
    begun: list[Path] = []

    class Stopped(TensorFile):
        """Is interrupted in the file after ``written_first``."""

        def __init__(self, path: Path, *rest: object) -> None:
            if len(begun) == written_first:
                raise KeyboardInterrupt
            begun.append(path)
            super().__init__(path, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(file_plan, "TensorFile", Stopped)
        imported(llama, tmp_path / "native")
    assert not (tmp_path / "native/iter_0000000").exists()
    written: list[Path] = []

    class Noted(TensorFile):
        """Notes the files that are written."""

        def __init__(self, path: Path, *rest: object) -> None:
            written.append(path)
            super().__init__(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(file_plan, "TensorFile", Noted)
    checkpoint = imported(llama, tmp_path / "native")
    files = json.loads((checkpoint / "metadata.json").read_text())["files"]
    assert not {path.name for path in begun} & {path.name for path in written}
    assert len(begun) + len(written) == len(files) > 3
    export_hub(Export.open(checkpoint), tmp_path / "again", ignore)
    before, after = tensors_of(llama), tensors_of(tmp_path / "again")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_too_little_room_is_said_before_anything_is_written(llama, tmp_path, monkeypatch, capsys) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(file_plan.shutil, "disk_usage", lambda _: usage)
    assert command.main(["import", str(llama), "--output", str(tmp_path / "native")]) == 3
    assert "the disk has 0.0 GB free" in capsys.readouterr().err
    assert not list((tmp_path / "native").rglob("*.safetensors*"))


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = tensors_of(folder)
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return damage


def _change_keys(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        keys = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(keys))

    return damage


def _tokenizer(ids: Iterable[int], *, as_list: bool = False) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        vocabulary = [[f"t{i}", -1.0] for i in ids] if as_list else {f"t{i}": i for i in ids}
        added = [{"id": 5000, "content": "<image>"}]
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))

    return write


NORM = "model.norm.weight"
DAMAGES = {
    "a shard that is cut": (_cut, "model.safetensors: is cut or damaged"),
    "no shard": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: is missing"),
    "a missing tensor": (_change_tensors(lambda w: w.pop(NORM)), f"has no tensor {NORM}"),
    "a surplus tensor": (
        _change_tensors(lambda w: w.update({"model.norm.scale": torch.ones(1)})),
        "holds the tensor model.norm.scale",
    ),
    "a wrong dtype": (_change_tensors(lambda w: w.update({NORM: w[NORM].to(torch.int32)})), f"{NORM} has dtype I32"),
    "a wrong shape": (
        _change_tensors(lambda w: w.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(3, 32)})),
        "q_proj.weight",
    ),
    "an unknown family": (_change_keys(model_type="mamba"), "model_type 'mamba' has state-space layers"),
    "an unknown class": (_change_keys(architectures=["LlamaForTokens"]), "architecture LlamaForTokens"),
    "an unknown key": (_change_keys(attention_multiplier=2.0), "attention_multiplier is unknown"),
    "an unknown activation": (_change_keys(hidden_act="swish2"), "hidden_act is 'swish2'"),
    "an unknown scaling": (
        _change_keys(rope_parameters={"rope_type": "ntk", "factor": 2.0}),
        "config.json: cannot be trained here: model.rope_scaling: rope_type ntk is not supported",
    ),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json: cannot be read"),
    "a vocabulary of another size": (_change_keys(vocab_size=99), "vocab_size 99, but the word table has 101 rows"),
    "a tokenizer of more tokens": (
        _tokenizer(range(102)),
        "tokenizer.json: has 102 tokens, but config.json has vocab_size",
    ),
    "a list of more tokens": (_tokenizer(range(102), as_list=True), "tokenizer.json: has 102 tokens"),
    "a damaged tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"vocab": '),
        "tokenizer.json: cannot be read",
    ),
    "another width": (_change_keys(intermediate_size=40), "but the files hold"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_bad_input_is_named_and_nothing_is_written(copy_of_llama, tmp_path, capsys, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(copy_of_llama)
    assert command.main(["import", str(copy_of_llama), "--output", str(tmp_path / "native")]) == 3
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "native").exists()


def test_a_smaller_tokenizer_is_taken_with_tokens_that_were_added(copy_of_llama, tmp_path) -> None:
    _tokenizer(range(90))(copy_of_llama)
    checkpoint = imported(copy_of_llama, tmp_path / "native")
    data = json.loads((checkpoint / "metadata.json").read_text())["config"]["data"]
    assert data["tokenizer_model"] == str(tmp_path / "native/hugging_face")


def test_an_existing_output_is_kept(llama, tmp_path, capsys) -> None:
    checkpoint = imported(llama, tmp_path / "native")
    before = (checkpoint / "metadata.json").read_bytes()
    assert command.main(["import", str(llama), "--output", str(tmp_path / "native")]) == 3
    assert "exists already" in capsys.readouterr().err
    assert (checkpoint / "metadata.json").read_bytes() == before
    (tmp_path / "again").mkdir()
    assert command.main(["export", str(tmp_path / "native"), "--output", str(tmp_path / "again")]) == 3
    assert list((tmp_path / "again").iterdir()) == []


def test_a_damaged_checkpoint_is_not_exported(llama, tmp_path) -> None:
    checkpoint = imported(llama, tmp_path / "native")
    file = next(checkpoint.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError):
        export_hub(Export.open(checkpoint), tmp_path / "again", ignore)
    assert not (tmp_path / "again").exists()


def test_a_checkpoint_with_a_removed_kernel_backend_is_exported(llama, tmp_path, capsys) -> None:
    file = imported(llama, tmp_path / "native") / "metadata.json"
    metadata = json.loads(file.read_text())
    metadata["config"]["training"]["kernel_backend"] = "nvrtc"
    file.write_text(json.dumps(metadata | {"checksum": checksum_of_metadata(metadata)}))
    assert command.main(["export", str(tmp_path / "native"), "--output", str(tmp_path / "again")]) == 0
    assert "training.kernel_backend: nvrtc, of an earlier release, is taken as auto" in capsys.readouterr().err


def test_an_export_names_what_old_and_new_readers_want(llama, tmp_path) -> None:
    export_hub(Export.open(imported(llama, tmp_path / "native")), tmp_path / "again", ignore)
    keys = json.loads((tmp_path / "again/config.json").read_text())
    assert keys["rope_theta"] == keys["rope_parameters"]["rope_theta"] == 500.0
    assert keys["rope_scaling"]["factor"] == keys["rope_parameters"]["factor"] == 4.0
    assert keys["torch_dtype"] == keys["dtype"] == "bfloat16"
    assert keys["architectures"] == ["LlamaForCausalLM"]
    assert (tmp_path / "again/generation_config.json").is_file()


def test_a_missing_folder_is_named(tmp_path, capsys) -> None:
    assert command.main(["import", str(tmp_path / "none"), "--output", str(tmp_path / "native")]) == 3
    assert "is not a folder" in capsys.readouterr().err
    with pytest.raises(HubError, match="config.json: is missing"):
        HubFolder(tmp_path)


@pytest.mark.parametrize("differs", [False, True])
def test_a_tied_head_may_be_stored_once_more(tmp_path, differs: bool) -> None:
    family = next(family for family in FAMILIES if family.model_type == "gemma2")
    published(family).save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub/model.safetensors"
    weights = load_file(file)
    table = weights["model.embed_tokens.weight"].clone()
    table[3, 3] += differs
    save_file({**weights, "lm_head.weight": table}, file, {"format": "pt"})
    if differs:
        with pytest.raises(HubError, match="lm_head.weight differs from model.embed_tokens.weight"):
            imported(tmp_path / "hub", tmp_path / "native")
        return
    export_hub(Export.open(imported(tmp_path / "hub", tmp_path / "native")), tmp_path / "again", ignore)
    assert tensors_of(tmp_path / "again").keys() == weights.keys()
