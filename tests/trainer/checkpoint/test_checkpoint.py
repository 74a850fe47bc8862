"""Checkpoints: what a load restores, in any precision, and models and start points that are refused."""

import json
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO

import pytest
import torch

from tests.trainer.checkpoint.test_directory import fake
from trainer.checkpoint.checksums import checksum_of_metadata
from trainer.checkpoint.directory import CheckpointError, checkpoint_path
from trainer.checkpoint.load import OTHER_DTYPES, load_weights, read_training_state, resume_optimizer
from trainer.checkpoint.metadata import load_metadata
from trainer.checkpoint.resume import check_start_point, restore
from trainer.checkpoint.save import CheckpointWriter
from trainer.config.errors import ConfigError
from trainer.config.sections.checkpoint import CheckpointConfig
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.planning.build_config import build_config
from trainer.process.progress import TrainingProgress

VOCAB_SIZE = 50  # padded to 56 or 64, depending on the layout
CPU = torch.device("cpu")


def load_state(checkpoint, model, optimizer):
    """Load weights, masters, moments and the optimizer's counters."""
    resume_optimizer(read_training_state(checkpoint, model, optimizer), model, optimizer)


def config_of(tp=1, pp=1, **changes):
    values = {
        "model": {
            "num_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "make_vocab_size_divisible_by": 8,
            "swiglu": True,
            "untie_embeddings_and_output_weights": False,
        },
        "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp},
        "training": {"train_iters": 10, "seq_length": 8},
        "optimizer": {"lr": 0.1},
    }
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    return build_config(values)


def build(config, rank, world_size):
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=60))
    model = build_model(config, VOCAB_SIZE, mesh, groups, CPU)
    return model, MixedPrecisionOptimizer(config, model)


def wholes(model, seed):
    """A made-up gradient for each parameter, with the same global numbers on every layout."""
    for name, layout in model.layouts.items():
        generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + seed)
        rows = layout.valid_rows or layout.global_shape[0]
        whole = torch.zeros(layout.global_shape)
        whole[:rows] = torch.randn((rows, *layout.global_shape[1:]), generator=generator)
        yield name, layout.shard(whole, model.mesh)


def step(model, optimizer, seed):
    gradients = dict(wholes(model, seed))
    for shard in model.gradients.parameter_shards:
        shard.gradient.copy_(gradients[shard.name].view(-1)[shard.start : shard.stop])
    optimizer.step(0.05)


def save(rank, world_size, root, config, steps):
    model, optimizer = build(config, rank, world_size)
    for number in range(steps):
        step(model, optimizer, number)
    writer = CheckpointWriter(root, config, VOCAB_SIZE, 1, CPU)
    writer.prepare(rank)
    progress = TrainingProgress(iteration=steps, consumed_samples=8 * steps, interval_loss=0.1, seed=5)
    writer.save(model, optimizer, progress)


def load_and_compare(rank, world_size, root, config, steps):
    """Largest difference between a loaded model and one trained here.

    Compared before and after one more step.
    """
    trained, its_optimizer = build(config, rank, world_size)
    for number in range(steps):
        step(trained, its_optimizer, number)
    loaded, optimizer = build(config, rank, world_size)
    with torch.no_grad():
        for parameter in loaded.parameters.values():
            parameter.fill_(float("nan"))
    progress = TrainingProgress()
    restored = restore(config, root, loaded, optimizer, progress, CPU)
    differences = [difference(trained, loaded)]
    for one, other in zip(its_optimizer.tensors().values(), optimizer.tensors().values(), strict=True):
        differences.append(max(float((one[name] - other[name]).abs().max()) for name in one))
    step(trained, its_optimizer, 99)
    step(loaded, optimizer, 99)
    return [*differences, difference(trained, loaded)], progress, restored.name


def difference(one, other):
    return max(float((parameter - other.parameters[name]).abs().max()) for name, parameter in one.parameters.items())


def test_vocabulary_is_stored_without_padding(ranks, tmp_path):
    ranks.run(save, tmp_path, config_of(tp=2), 1, world_size=2)
    metadata = load_metadata(checkpoint_path(tmp_path, 1))
    tables = [tensor for tensor in metadata.tensors["model"].values() if VOCAB_SIZE in tensor.shape]
    assert len(tables) == 1
    assert [(part.offset, part.shape) for part in tables[0].parts] == [((0, 0), (32, 16)), ((32, 0), (18, 16))]
    assert metadata.vocab_size == VOCAB_SIZE


def test_checkpoints_load_in_other_precisions(ranks, tmp_path):
    low = config_of(training={"bf16": True})
    ranks.run(save, tmp_path / "low", low, 2, world_size=1)
    ranks.run(save, tmp_path / "full", config_of(), 2, world_size=1)
    [(differences, progress, name)] = ranks.run(load_and_compare, tmp_path / "low", low, 2, world_size=1)
    assert differences == [0.0] * 5
    assert (progress.iteration, progress.consumed_samples, progress.interval_loss) == (2, 16, 0.1)
    assert name == "iter_0000002"
    ranks.run(load_across_precisions, tmp_path, world_size=1)


def load_across_precisions(_rank, _world_size, folder):
    full, optimizer = build(config_of(), 0, 1)
    load_state(checkpoint_path(folder / "low", 2), full, optimizer)
    low, low_optimizer = build(config_of(training={"bf16": True}), 0, 1)
    load_state(checkpoint_path(folder / "low", 2), low, low_optimizer)
    for name, master in low_optimizer.tensors()["master"].items():
        assert torch.equal(full.parameters[name].view(-1), master)
    load_state(checkpoint_path(folder / "full", 2), low, low_optimizer)
    load_weights(checkpoint_path(folder / "full", 2), full)
    for name, master in low_optimizer.tensors()["master"].items():
        assert torch.equal(full.parameters[name].view(-1), master)
        assert torch.equal(low.parameters[name].view(-1), master.bfloat16())


@pytest.mark.parametrize(("before", "now"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_moments_of_another_dtype_are_read_with_a_note(ranks, tmp_path, before, now):
    old, new = (config_of(optimizer={"exp_avg_dtype": dtype}) for dtype in (before, now))
    ranks.run(save, tmp_path, old, 2, world_size=1)
    [note] = ranks.run(load_and_round, tmp_path, old, new, world_size=1)
    names = {"fp32": "F32", "bf16": "BF16"}
    assert note.startswith(f"{OTHER_DTYPES}: exp_avg: {names[now]} instead of {names[before]}; results differ")


def load_and_round(_rank, _world_size, folder, old, new):
    """Output of loads of a checkpoint with the old and the new config; the moments differ by rounding."""
    with redirect_stdout(StringIO()) as printed:
        (_, same), (_, other) = (build(config, 0, 1) for config in (old, new))
        load_state(checkpoint_path(folder, 2), build(old, 0, 1)[0], same)
        assert not printed.getvalue()
        load_state(checkpoint_path(folder, 2), build(new, 0, 1)[0], other)
    for name, average in same.tensors()["exp_avg"].items():
        found = other.tensors()["exp_avg"][name]
        assert found.dtype != average.dtype
        assert torch.equal(found, average.to(found.dtype))
        assert torch.equal(other.tensors()["exp_avg_sq"][name], same.tensors()["exp_avg_sq"][name])
    return printed.getvalue()


def test_another_model_is_refused(ranks, tmp_path):
    ranks.run(save, tmp_path, config_of(), 1, world_size=1)
    ranks.run(refuse_others, tmp_path, world_size=1)


def refuse_others(_rank, _world_size, root):
    path = checkpoint_path(root, 1)
    wider, _ = build(config_of(model={"hidden_size": 32}), 0, 1)
    with pytest.raises(CheckpointError, match=r"of shape \[.*this model"):
        load_weights(path, wider)
    deeper, _ = build(config_of(model={"num_layers": 4}), 0, 1)
    with pytest.raises(CheckpointError, match="has no tensor"):
        load_weights(path, deeper)
    shallower, _ = build(config_of(model={"num_layers": 1}), 0, 1)
    with pytest.raises(CheckpointError, match="which this model does not have"):
        load_weights(path, shallower)
    momentum, optimizer = build(config_of(optimizer={"optimizer": "sgd"}), 0, 1)
    with pytest.raises(CheckpointError, match="no_load_optim"):
        load_state(path, momentum, optimizer)


def test_every_stage_refuses_unknown_tensors(ranks, tmp_path):
    ranks.run(save, tmp_path / "deep", config_of(model={"num_layers": 4}), 1, world_size=1)
    untied = config_of(model={"untie_embeddings_and_output_weights": True, "position_embedding_type": "rope"})
    ranks.run(save, tmp_path / "untied", untied, 1, world_size=1)
    biased = config_of(model={"disable_bias_linear": False})
    ranks.run(save, tmp_path / "biased", biased, 1, world_size=1)
    plain = config_of(pp=2, model={"disable_bias_linear": True})
    rope = config_of(pp=2, model={"position_embedding_type": "rope"})
    assert ranks.run(surplus, tmp_path / "deep", config_of(pp=2), world_size=2)[1].startswith("layers.2.")
    assert ranks.run(surplus, tmp_path / "untied", rope, world_size=2) == [None, "head.weight"]
    found = ranks.run(surplus, tmp_path / "biased", plain, world_size=2)
    assert [name.split(".")[1] for name in found] == ["0", "1"]
    assert all(name.endswith(".bias") for name in found)
    found = ranks.run(surplus, tmp_path / "biased", rope, world_size=2)
    assert found == ["embedding.position.weight", None]


def surplus(rank, world_size, root, config):
    """Name of the tensor in the error of this rank's stage."""
    model, _ = build(config, rank, world_size)
    try:
        load_weights(checkpoint_path(root, 1), model)
    except CheckpointError as error:
        return str(error).partition("holds the tensor ")[2].partition(",")[0]
    return None


def test_same_shapes_with_another_meaning_are_refused(ranks, tmp_path):
    heads = {"num_query_groups": None, "swiglu": False}
    ranks.run(save, tmp_path, config_of(model=heads), 1, world_size=1)
    ranks.run(refuse_other_meanings, tmp_path, heads, world_size=1)


def refuse_other_meanings(_rank, _world_size, root, heads):
    for changes, says in (
        ({"num_attention_heads": 8}, "num_attention_heads 4, but this run has 8"),
        ({"openai_gelu": True}, "openai_gelu False, but this run has True.* set it to False$"),
        ({"norm_epsilon": 1e-6}, "norm_epsilon 1e-05, .* or take only the weights with checkpoint.finetune"),
    ):
        config = config_of(model=heads | changes)
        model, optimizer = build(config, 0, 1)
        with pytest.raises(CheckpointError, match=says):
            restore(config, root, model, optimizer, TrainingProgress(), CPU)
    config = config_of(
        model=heads | {"norm_epsilon": 1e-6, "num_query_groups": 4},
        checkpoint={"load": str(root), "finetune": True},
    )
    model, optimizer = build(config, 0, 1)
    assert restore(config, None, model, optimizer, TrainingProgress(), CPU) == checkpoint_path(root, 1)


def test_another_router_is_refused(ranks, tmp_path):
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 8}
    ranks.run(save, tmp_path, config_of(model=experts), 1, world_size=1)
    ranks.run(refuse_other_routers, tmp_path, experts, world_size=1)


def refuse_other_routers(_rank, _world_size, root, experts):
    def resume(changes, **keys):
        config = config_of(model=experts | changes, checkpoint=keys)
        model, optimizer = build(config, 0, 1)
        return restore(config, None if keys else root, model, optimizer, TrainingProgress(), CPU)

    routers = {
        "moe_router_topk": 3,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 2.5,
    }
    capacity = {"moe_expert_capacity_factor": 1.5, "moe_token_drop_policy": "position"}
    path = checkpoint_path(root, 1)

    def refuse():
        for key, value in routers.items():
            with pytest.raises(CheckpointError, match=rf"{key} .*, but this run has {value}.* set it to \S+$"):
                resume({key: value})
        with pytest.raises(CheckpointError, match="moe_expert_capacity_factor None, .* with checkpoint.finetune$"):
            resume(capacity)
        assert resume(capacity, load=str(root), finetune=True) == path
        assert resume({}) == path
        # Sinkhorn's scores are a softmax over all experts.
        with pytest.raises(CheckpointError, match=r"moe_router_pre_softmax False, but this run has True"):
            resume({"moe_router_load_balancing_type": "sinkhorn"})
        assert resume({"moe_router_load_balancing_type": "seq_aux_loss"}) == path

    refuse()
    metadata = json.loads((path / "metadata.json").read_text())
    for key in routers | capacity:
        del metadata["config"]["model"][key]
    (path / "metadata.json").write_text(json.dumps(metadata | {"checksum": checksum_of_metadata(metadata)}))
    refuse()


def test_start_point_is_checked_before_anything_starts(tmp_path):
    nothing = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        check_start_point(CheckpointConfig(load=nothing), tmp_path)
    check_start_point(CheckpointConfig(load=nothing), tmp_path / "nothing")
    with pytest.raises(ConfigError, match=f"is a single checkpoint; name the folder that contains it, {tmp_path}"):
        check_start_point(CheckpointConfig(load=str(fake(tmp_path, 3))), None)
    with pytest.raises(ConfigError, match="choose another folder"):
        check_start_point(CheckpointConfig(load=nothing, finetune=True), tmp_path / "nothing")
    check_start_point(CheckpointConfig(load=nothing), tmp_path)  # which holds a checkpoint by now


def start_from(_rank, _world_size, folder, save_in, **keys):
    config = config_of(checkpoint={"load": str(folder), **keys})
    model, optimizer = build(config, 0, 1)
    progress = TrainingProgress(seed=1)
    restored = restore(config, save_in, model, optimizer, progress, CPU)
    return restored, progress.iteration, progress.seed, optimizer.steps


def finetuned(rank, world_size, folder, save_in):
    return start_from(rank, world_size, folder, save_in, finetune=True)


def without_optimizer(rank, world_size, folder, save_in):
    return start_from(rank, world_size, folder, save_in, no_load_optim=True, no_load_rng=True)


def test_start_points_load_what_the_config_requests_and_own_checkpoints_come_first(ranks, tmp_path):
    folder, own = tmp_path / "start", tmp_path / "own"
    ranks.run(save, folder, config_of(), 3, world_size=1)
    start = checkpoint_path(folder, 3)
    assert ranks.run(start_from, folder, own, world_size=1) == [(start, 3, 5, 3)]
    assert ranks.run(finetuned, folder, own, world_size=1) == [(start, 0, 1, 0)]
    assert ranks.run(without_optimizer, folder, own, world_size=1) == [(start, 3, 1, 0)]
    ranks.run(save, own, config_of(), 4, world_size=1)
    assert ranks.run(finetuned, folder, own, world_size=1) == [(checkpoint_path(own, 4), 4, 5, 4)]
