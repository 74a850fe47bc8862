"""Weights of Megatron-core's torch_dist checkpoints: the same bits as Hugging Face's, and bad input."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.conversion import megatron_files
from tests.trainer.families.published_models import published
from tests.trainer.spawn import Ranks
from trainer.commands import checkpoint as command
from trainer.conversion.import_hub import import_hub
from trainer.conversion.verify import verify_export
from trainer.families.catalogue import FAMILIES
from trainer.hub.folder import HubFolder

pytest.importorskip("transformers")

SHAPE = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "make_vocab_size_divisible_by": 16,
    "padded_vocab_size": 112,
    "vocab_size": 101,
    "num_query_groups": 1,
    "mtp_num_layers": None,
}
LLAMA = {
    **SHAPE,
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 4,
}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as ranks:
        yield ranks


def hub_folder(model_type: str, folder: Path):
    """A folder of the family's tiny model; its model section, and the weights."""
    family = next(family for family in FAMILIES if family.model_type == model_type)
    published(family).to(torch.bfloat16).save_pretrained(folder)
    with HubFolder(folder) as source:
        return source.model, {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def arguments_of(model, base):
    """Megatron-LM's arguments of a model section."""
    names = ("ffn_hidden_size", "max_position_embeddings", "rotary_base", "norm_epsilon", "openai_gelu")
    return {**base, **{name: getattr(model, name) for name in names}}


def padded(weights):
    """The tables padded to 112 rows, as for 2 tensor-parallel ranks."""
    tables = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {
        k: torch.cat([v, torch.ones(11, v.shape[1], dtype=v.dtype)]) if k in tables else v for k, v in weights.items()
    }


@pytest.fixture(scope="module")
def llama(ranks, tmp_path_factory):
    """A Hugging Face folder, and the same model as a torch_dist checkpoint of two ranks."""
    root = tmp_path_factory.mktemp("llama")
    model, hub = hub_folder("llama", root / "hub")
    weights = padded(megatron_files.of_llama(hub, 4, 4))
    arguments = arguments_of(model, LLAMA)
    if model.rope_scaling is not None:
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": model.rope_scaling["factor"]}
    ranks.run(megatron_files.write, root / "megatron/iter_0000100", weights, arguments)
    return root


def same_tensors(one: Path, other: Path) -> None:
    """Both checkpoints hold the same bits under the same names."""
    first, second = ({k: v for f in p.glob("*.safetensors") for k, v in load_file(f).items()} for p in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def imported(folder: Path, output: Path) -> Path:
    with HubFolder(folder) as source:
        return import_hub(source, output, lambda _: None)


def test_a_llama_of_two_ranks_has_the_bits_of_its_hub_folder(llama, tmp_path, capsys):
    assert (llama / "megatron/iter_0000100/__1_0.distcp").is_file()
    assert command.main(["import", str(llama / "megatron"), "--output", str(tmp_path / "native")]) == 0
    assert "GPT of Megatron-core, 27 tensors" in capsys.readouterr().out
    same_tensors(tmp_path / "native/iter_0000000", imported(llama / "hub", tmp_path / "other"))


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_other_models_compute_the_logits_of_transformers(ranks, tmp_path, name):
    model, hub = hub_folder(name, tmp_path / "hub")
    if name == "gpt2":
        weights, base = megatron_files.of_gpt2(hub, 4, 8), {**SHAPE, "position_embedding_type": "learned_absolute"}
        # The fused op computes the tanh approximation, whatever the flag says.
        arguments = arguments_of(model, base) | {"openai_gelu": False, "bias_gelu_fusion": True}
    else:
        experts = {"num_experts": model.num_experts, "moe_router_topk": model.moe_router_topk}
        weights = megatron_files.of_mixtral(hub, 4, model.query_groups, model.num_experts)
        arguments = arguments_of(model, {**LLAMA, **experts, "num_query_groups": model.query_groups})
    ranks.run(megatron_files.write, tmp_path / "megatron/iter_0000100", padded(weights), arguments)
    assert command.main(["import", str(tmp_path / "megatron"), "--output", str(tmp_path / "native")]) == 0
    same_tensors(tmp_path / "native/iter_0000000", imported(tmp_path / "hub", tmp_path / "other"))
    verified = verify_export(tmp_path / "native/iter_0000000", tmp_path / "hub")
    assert verified.is_good and verified.witness.startswith("transformers")


class Command:
    """A pickle that would run a program."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _cut(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def _run_a_program(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Command(folder / "made")))


def _change(**changes):
    def change(folder: Path) -> None:
        found = torch.load(folder / "common.pt", weights_only=False)
        for name, value in changes.items():
            setattr(found["args"], name, value)
        torch.save(found, folder / "common.pt")

    return change


DAMAGES = {
    "a file that is cut": (_cut, "__0_0.distcp: is cut"),
    "no file": (lambda folder: (folder / "__1_0.distcp").unlink(), "__1_0.distcp: cannot be read"),
    "a program": (_run_a_program, "holds an object of posix.mkdir, which no checkpoint needs"),
    "no arguments": (lambda folder: (folder / "common.pt").unlink(), "has no arguments of Megatron-LM"),
    "a cut common.pt": (lambda folder: (folder / "common.pt").write_bytes(b"PK"), "its common state cannot be read"),
    "another number of layers": (_change(num_layers=3), "has 4 layers, but its arguments say 3"),
    "another width": (_change(ffn_hidden_size=64), "but the tensors hold"),
    "a part that is not carried": (_change(mtp_num_layers=1), "had mtp_num_layers 1"),
    "a tied head": (_change(untie_embeddings_and_output_weights=False), "say that the head is tied"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_bad_input_is_named_and_nothing_is_written(llama, tmp_path, capsys, name):
    damage, message = DAMAGES[name]
    shutil.copytree(llama / "megatron", tmp_path / "megatron")
    damage(tmp_path / "megatron/iter_0000100")
    assert command.main(["import", str(tmp_path / "megatron"), "--output", str(tmp_path / "native")]) == 3
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "native").exists() and not (tmp_path / "megatron/iter_0000100/made").exists()


def test_a_program_in_the_arguments_is_not_run(llama, tmp_path):
    shutil.copytree(llama / "megatron", tmp_path / "megatron")
    _change(other=Command(tmp_path / "made"))(tmp_path / "megatron/iter_0000100")
    assert command.main(["import", str(tmp_path / "megatron"), "--output", str(tmp_path / "native")]) == 0
    assert not (tmp_path / "made").exists()


def test_a_program_in_place_of_a_tensor_is_not_run(llama, tmp_path, capsys):
    shutil.copytree(llama / "megatron", tmp_path / "megatron")
    file = tmp_path / "megatron/iter_0000100/__0_0.distcp"
    program = pickle.dumps(Command(tmp_path / "made"), protocol=2)
    file.write_bytes(program + file.read_bytes()[len(program) :])
    assert command.main(["import", str(tmp_path / "megatron"), "--output", str(tmp_path / "native")]) == 3
    assert f"{file}: " in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "words"), [("mp_rank_00", "in the format torch,"), ("common.pt", "in the format zarr,")]
)
def test_other_formats_are_refused_by_name(tmp_path, capsys, name, words):
    (tmp_path / "iter_0000100" / name).mkdir(parents=True)
    assert command.main(["import", str(tmp_path), "--output", str(tmp_path / "native")]) == 3
    assert words in capsys.readouterr().err


def test_a_checkpoint_of_another_program_is_refused(ranks, tmp_path, capsys):
    ranks.run(megatron_files.write, tmp_path / "iter_0000100", {"layers.0.wq.weight": torch.zeros(4, 4)}, {})
    assert command.main(["import", str(tmp_path), "--output", str(tmp_path / "native")]) == 3
    assert "not a GPT model of Megatron-core" in capsys.readouterr().err
