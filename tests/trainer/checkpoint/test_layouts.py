"""Checkpoints between layouts: each layout reads each other's, every element exactly once."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.trainer.checkpoint.test_checkpoint import CPU, VOCAB_SIZE, build, config_of, load_state, save
from tests.trainer.spawn import Ranks
from trainer.checkpoint.checksums import checksum_of_metadata
from trainer.checkpoint.directory import METADATA, CheckpointError, checkpoint_path
from trainer.checkpoint.metadata import StoredPart, StoredTensor, load_metadata
from trainer.checkpoint.regions import is_partition, overlap, regions_of_flat_range
from trainer.checkpoint.resume import restore
from trainer.checkpoint.save import CheckpointWriter
from trainer.checkpoint.saving.staging import stored_shape
from trainer.process.progress import TrainingProgress

VERSION_1 = Path(__file__).parents[2] / "recorded" / "checkpoint_version_1"


def test_a_flat_range_of_a_box_is_its_regions():
    for shape in ((5,), (3, 4), (2, 3, 2), (2, 1, 3)):
        size = math.prod(shape)
        global_shape = tuple(length + 2 for length in shape)
        whole = torch.arange(math.prod(global_shape)).view(global_shape)
        box = whole[tuple(slice(1, 1 + length) for length in shape)].reshape(-1)
        for start, stop in itertools.combinations(range(size + 1), 2):
            regions = list(regions_of_flat_range((1,) * len(shape), shape, start, stop))
            assert len(regions) <= 2 * len(shape) - 1
            assert [region.start for region in regions] == [start, *(region.stop for region in regions[:-1])]
            parts = [cut(whole, region.offset, region.shape).reshape(-1) for region in regions]
            assert torch.equal(torch.cat(parts), box[start:stop])


def cut(whole, offset, shape):
    return whole[tuple(slice(first, first + length) for first, length in zip(offset, shape, strict=True))]


def test_boxes_overlap_in_a_box_or_not_at_all():
    assert overlap((0, 2), (4, 4), (3, 0), (9, 3)) == ((3, 2), (1, 1))
    assert overlap((0, 2), (3, 4), (3, 0), (9, 3)) is None


def halves(box, random):
    """The box itself, or two random parts of it."""
    offset, extent = box
    dim = random.randrange(len(offset))
    cut = random.randint(0, extent[dim])
    for start, length in ((0, cut), (cut, extent[dim] - cut)):
        if length:
            moved = (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])
            yield moved, (*extent[:dim], length, *extent[dim + 1 :])


def elements(offset, extent):
    return itertools.product(*(range(first, first + length) for first, length in zip(offset, extent, strict=True)))


def test_boxes_is_partition_where_they_hold_every_element_once():
    random, outcomes = Random(5), Counter()
    for _ in range(3000):
        shape = tuple(random.randint(1, 3) for _ in range(random.randint(1, 3)))
        nowhere = (0,) * len(shape)
        boxes = [(nowhere, shape)]
        for _ in range(random.randint(0, 4)):
            boxes += halves(boxes.pop(random.randrange(len(boxes))), random)
        if random.random() < 0.7:
            offset, extent = boxes.pop(random.randrange(len(boxes)))
            boxes.append((tuple(first + random.randint(-1, 1) for first in offset), extent))
        counts = Counter(element for box in boxes for element in elements(*box))
        expected = counts == Counter(elements(nowhere, shape))
        assert is_partition(boxes, shape) is expected, (boxes, shape)
        outcomes[expected] += 1
    assert min(outcomes[True], outcomes[False]) > 500


def test_a_tensor_is_complete_by_flat_ranges_of_any_boxes():
    halves = [StoredPart("f", "w", (0, column), (4, 3), *ends) for column in (0, 3) for ends in ((0, 5), (5, 12))]
    rows = [StoredPart("f", "w", (0, 0), (2, 6), 0, 12), StoredPart("f", "w", (0, 0), (4, 6), 12, 24)]
    for parts in (halves, rows):
        assert StoredTensor((4, 6), "F32", tuple(parts)).is_complete
        assert not StoredTensor((4, 6), "F32", tuple(parts[1:])).is_complete
        assert not StoredTensor((4, 6), "F32", (*parts, parts[0])).is_complete
    moved = (halves[0], halves[1]._replace(start=4, stop=11), *halves[2:])
    assert not StoredTensor((4, 6), "F32", moved).is_complete


def layout(world_size, **keys):
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "zero": "data_parallel_sharding_strategy",
        "chunks": "num_virtual_stages_per_pipeline_rank",
    }
    return world_size, {names[key]: value for key, value in keys.items()}


OPTIM, GRADS, PARAMS = "optim", "optim_grads", "optim_grads_params"
# An odd number of layers, and on some layouts fewer key and value heads than tensor-parallel ranks.
DENSE = {"num_layers": 5}
LAYOUTS = {
    "serial": layout(1),
    "zero1": layout(2, zero=OPTIM),
    "tp2 pp2": layout(4, tp=2, pp=2),
    "zero3": layout(4, zero=PARAMS),
    "tp4": layout(4, tp=4),
    "pp2 zero1": layout(4, pp=2, zero=OPTIM),
    "tp2 cp2": layout(4, tp=2, cp=2),
    "pp4": layout(4, pp=4),
    "tp2 zero2": layout(4, tp=2, zero=GRADS),
    "pp2 interleaved": layout(2, pp=2, chunks=2),
    "pp2 zero3": layout(4, pp=2, zero=PARAMS),
}
EXPERTS = {"num_layers": 3, "num_experts": 4, "moe_layer_freq": 2, "untie_embeddings_and_output_weights": True}
EXPERT_LAYOUTS = {
    "serial": layout(1),
    "ep2": layout(4, ep=2),
    "ep2 zero1": layout(4, ep=2, zero=OPTIM),
    "tp2 ep2": layout(4, tp=2, ep=2),
    "ep2 zero3": layout(4, ep=2, zero=PARAMS),
    "pp2 ep2": layout(4, pp=2, ep=2),
    "ep4 zero2": layout(4, ep=4, zero=GRADS),
    "tp2 whole ep4": layout(4, tp=2, ep=4, etp=1, zero=OPTIM),
    "tp4 etp2 ep2": layout(4, tp=4, ep=2, etp=2),
}
FAMILIES = {"dense": (DENSE, LAYOUTS), "experts": (EXPERTS, EXPERT_LAYOUTS)}
CELLS = [(family, name) for family, (_, layouts) in FAMILIES.items() for name in layouts]
SERIAL = LAYOUTS["serial"][1]
STEPS = 2


def config_in(family, parallel):
    # The smallest batch that every layout can divide.
    training = {"global_batch_size": 4, "seq_length": 8}
    return config_of(model={**FAMILIES[family][0], "attention_dropout": 0.0}, parallel=parallel, training=training)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Folder of a layout's checkpoint, by family and name; each is written once."""
    folders = {}

    def folder(family, name):
        if (family, name) not in folders:
            folders[family, name] = tmp_path_factory.mktemp("saved")
            world_size, parallel = FAMILIES[family][1][name]
            config = config_in(family, parallel)
            ranks.run(save, folders[family, name], config, STEPS, world_size=world_size)
        return folders[family, name]

    return folder


def resave(rank, world_size, source, target, config):
    """Load on this layout and save the result."""
    model, optimizer = build(config, rank, world_size)
    spoil(model, optimizer)
    progress = TrainingProgress()
    restore(config, source, model, optimizer, progress, CPU)
    writer = CheckpointWriter(target, config, VOCAB_SIZE, 1, CPU)
    writer.prepare(rank)
    writer.save(model, optimizer, progress)
    return optimizer.steps


@torch.no_grad()
def spoil(model, optimizer):
    for shard in model.gradients.parameter_shards:
        shard.weight.fill_(float("nan"))
    for tensors in optimizer.tensors().values():
        for tensor in tensors.values():
            tensor.fill_(float("nan"))


def whole_state(root):
    """Every tensor of a checkpoint, put together without the loader."""
    path = checkpoint_path(root, STEPS)
    metadata = load_metadata(path)
    state = {}
    for kind, named in metadata.tensors.items():
        for name, stored in named.items():
            whole = torch.full(stored.shape, float("nan"))
            for part in stored.parts:
                with safe_open(str(path / part.file), "pt") as file:
                    values = file.get_tensor(part.key).flatten()
                box = cut(whole, part.offset, part.shape)
                flat = box.flatten()
                flat[part.start : part.stop] = values
                box.copy_(flat.view(part.shape))
            state[kind, name] = whole
    return state


@pytest.mark.parametrize(("family", "written"), CELLS)
@pytest.mark.parametrize("stride", [0, 1, 3])
def test_loaded_tensors_equal_saved_tensors(ranks, saved, tmp_path, family, written, stride):
    layouts = FAMILIES[family][1]
    names = list(layouts)
    world_size, parallel = layouts[names[(names.index(written) + stride) % len(names)]]
    source = saved(family, written)
    answers = ranks.run(resave, source, tmp_path, config_in(family, parallel), world_size=world_size)
    assert answers == [STEPS] * world_size
    compare_states(whole_state(source), whole_state(tmp_path))


def compare_states(before, after):
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.isfinite().all(), key
        assert torch.equal(tensor, after[key]), key


@pytest.mark.parametrize(("family", "name"), CELLS)
def test_every_layout_trains_the_same_model(saved, family, name):
    serial, state = whole_state(saved(family, "serial")), whole_state(saved(family, name))
    assert serial.keys() == state.keys()
    for key, tensor in serial.items():
        # The clipping norm is summed in another order.
        torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=1e-6, msg=str(key))


def test_ranks_without_own_elements_write_no_file(saved):
    path = checkpoint_path(saved("dense", "tp2 cp2"), STEPS)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert files == sorted(f"{kind}_rank0000{rank}.safetensors" for kind in ("model", "optimizer") for rank in (0, 1))


def test_eight_ranks_in_three_axes(saved, tmp_path):
    world_size, parallel = layout(8, tp=2, pp=2, zero=OPTIM)
    with Ranks(8) as many:
        source = saved("dense", "serial")
        many.run(resave, source, tmp_path, config_in("dense", parallel), world_size=world_size)
    compare_states(whole_state(source), whole_state(tmp_path))


def test_metadata_names_the_layout_that_wrote(saved):
    says = load_metadata(checkpoint_path(saved("dense", "pp2 zero3"), STEPS)).layout
    assert says == {"tp": 1, "pp": 2, "dp": 2, "cp": 1, "ep": 1, "zero_stage": 3, "pipeline_schedule": "1f1b"}


def test_version_1_is_read(ranks):
    sums = json.loads((VERSION_1 / "expected_sums.json").read_text())
    for training, parallel in (({"bf16": True}, {"tensor_model_parallel_size": 2}), ({}, SERIAL)):
        config = config_of(model={"hidden_size": 8}, training=training, parallel=parallel)
        found = ranks.run(read_version_1, config, world_size=parallel.get("tensor_model_parallel_size", 1))
        for kind, named in found[0].items():
            expected = sums["master" if kind == "model" and not training else kind]
            assert named.keys() == expected.keys()
            for name in named:
                total = [math.fsum(values) for values in zip(*(part[kind][name] for part in found), strict=True)]
                assert total == pytest.approx(expected[name], rel=1e-12, abs=1e-12), (kind, name)


def read_version_1(rank, world_size, config):
    """Sums over this rank's elements of each tensor.

    One plain sum, and one weighted by place in the global tensor.
    """
    model, optimizer = build(config, rank, world_size)
    spoil(model, optimizer)
    load_state(VERSION_1 / "iter_0000003", model, optimizer)
    kinds = {"model": {name: weight.detach().view(-1) for name, weight in model.parameters.items()}}
    sums = {}
    for kind, tensors in (kinds | optimizer.tensors()).items():
        for name, tensor in tensors.items():
            shape = stored_shape(model.layouts[name])
            places = torch.arange(1, math.prod(shape) + 1).view(shape)
            sums.setdefault(kind, {})[name] = [0.0, 0.0]
            for box in model.layouts[name].boxes(model.mesh):
                if box.is_owned:
                    part = tensor[box.start : box.stop].double().view(box.shape)
                    weighted = part * cut(places, box.offset, box.shape)
                    sums[kind][name] = [float(part.sum()), float(weighted.sum())]
    return sums


def test_missing_and_doubled_elements_are_named(ranks, saved, tmp_path):
    path = checkpoint_path(saved("dense", "tp2 cp2"), STEPS)
    values = json.loads((path / METADATA).read_text())
    name = next(name for name in values["tensors"]["model"] if "qkv.weight" in name)
    parts = values["tensors"]["model"][name]["parts"]
    assert len(parts) == 2
    for number, (changed, says) in enumerate(
        ((parts[:1], "is incomplete"), ([parts[0], parts[0]], "overlaps itself"), ([*parts, parts[1]], "overlaps"))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in path.glob("*.safetensors"):
            (folder / file.name).symlink_to(file)
        values["tensors"]["model"][name]["parts"] = changed
        (folder / METADATA).write_text(json.dumps(values | {"checksum": checksum_of_metadata(values)}))
        (problem,) = ranks.run(problem_of, folder, config_in("dense", SERIAL), world_size=1)
        assert f"{folder}: {name} {says}" in problem


def test_a_file_that_contradicts_the_metadata_is_refused(ranks, saved, tmp_path):
    path = checkpoint_path(saved("dense", "serial"), STEPS)
    values = json.loads((path / METADATA).read_text())
    del values["checksums"], values["checksum"]
    (tmp_path / METADATA).write_text(json.dumps(values))
    (file,) = path.glob("model_*.safetensors")
    with safe_open(str(file), "pt") as tensors:
        contents = {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
    key = "layers.1.attention.qkv.weight"
    save_file({**contents, key: contents[key][1:].clone()}, tmp_path / file.name)
    (tmp_path / "optimizer_rank00000.safetensors").symlink_to(path / "optimizer_rank00000.safetensors")
    (problem,) = ranks.run(problem_of, tmp_path, config_in("dense", SERIAL), world_size=1)
    assert f"{tmp_path}: {key} has" in problem
    save_file({other: tensor for other, tensor in contents.items() if other != key}, tmp_path / file.name)
    (problem,) = ranks.run(problem_of, tmp_path, config_in("dense", SERIAL), world_size=1)
    assert f"{tmp_path}: {key} cannot be read" in problem


def problem_of(_rank, _world_size, path, config):
    model, optimizer = build(config, 0, 1)
    with pytest.raises(CheckpointError) as error:
        load_state(path, model, optimizer)
    return str(error.value)
