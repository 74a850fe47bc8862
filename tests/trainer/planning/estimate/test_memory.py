"""Estimated parameters and states against the ranks that the trainer builds."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from trainer.config.sections.hooks import HooksConfig
from trainer.config.train_config import TrainConfig
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.planning.build_config import build_config
from trainer.planning.estimate.activations import backward_bytes, layer_bytes
from trainer.planning.estimate.devices import DEVICES, GIB, find_device
from trainer.planning.estimate.memory import memory_of_ranks, peak_schedule, schedule_of, state_bytes
from trainer.planning.estimate.parameters import parameters_of_ranks
from trainer.planning.estimate.plan import plan_run, remedy
from trainer.planning.parts.attention import score_cost, score_flops
from trainer.planning.schedule import kept_activations

VOCAB = 100
LLAMA = {
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
EXPERTS = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 96, "moe_shared_expert_intermediate_size": 64}
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def tiny(
    model: dict[str, Any], parallel: dict[str, Any], optimizer: dict[str, Any] | None = None, **training: Any
) -> TrainConfig:
    return build_config(
        {
            "model": {"num_layers": 6, "hidden_size": 64, "num_attention_heads": 8, **model},
            "parallel": parallel,
            "training": {"train_iters": 1, "seq_length": 32, "global_batch_size": 64, **training},
            "optimizer": {"lr": 1e-3, **(optimizer or {})},
        }
    )


@pytest.mark.parametrize(
    ("model", "parallel", "world_size"),
    [
        ({}, {}, 1),
        ({}, {TP: 2, PP: 2}, 4),
        (LLAMA, {TP: 4, PP: 2}, 8),
        ({"qk_layernorm": True}, {PP: 2, "pipeline_schedule": "zb-v"}, 2),
        (
            {**LLAMA, "qk_layernorm": True, "qk_layernorm_scope": "all"},
            {TP: 2, PP: 2, "num_virtual_stages_per_pipeline_rank": 2},
            4,
        ),
        (
            {**EXPERTS, "moe_layer_freq": 2},
            {TP: 2, PP: 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
            8,
        ),
        (
            {**EXPERTS, "moe_shared_expert_intermediate_size": 16},
            {TP: 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
            4,
        ),
        (EXPERTS, {TP: 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, 4),
    ],
)
def test_parameters_of_every_rank_are_exact(model: dict[str, Any], parallel: dict[str, Any], world_size: int) -> None:
    config = tiny(model, parallel)
    for rank in range(world_size):
        mesh = ParallelMesh.build(config, rank, world_size)
        built = build_model(config, VOCAB, mesh, ProcessGroups(), torch.device("meta"), is_frozen=True)
        sizes = {name: parameter.numel() for name, parameter in built.parameters.items()}
        found = parameters_of_ranks(config, VOCAB)[mesh.pp_rank]
        assert found.total == sum(sizes.values())
        assert found.experts == sum(size for name, size in sizes.items() if built.layouts[name].is_expert)


@pytest.mark.parametrize(("bf16", "remainders"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("of_average", "of_square"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_states_are_those_that_a_rank_holds(bf16: bool, remainders: bool, of_average: str, of_square: str) -> None:
    options: dict[str, Any] = {"exp_avg_dtype": of_average, "exp_avg_sq_dtype": of_square}
    # With them the dtype of the gradients, where it may be another.
    options["main_grads_dtype"] = of_square if bf16 else "fp32"
    options["store_param_remainders"] = remainders
    config = tiny(LLAMA, {}, options, bf16=bf16)
    mesh = ParallelMesh.build(config, 0, 1)
    model = build_model(config, VOCAB, mesh, ProcessGroups(), torch.device("cpu"))
    optimizer = MixedPrecisionOptimizer(config, model)
    weights = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters.values())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters.values()}
    states = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (
            *optimizer._masters.values(),
            *(t for kind in optimizer._moments.values() for t in kind.values()),
        )
    }
    gradients = {
        shard.gradient.untyped_storage().data_ptr(): shard.gradient.untyped_storage().nbytes()
        for shard in model.gradients.parameter_shards
    }
    found = state_bytes(config, parameters_of_ranks(config, VOCAB)[0], 1)
    assert found[0] == weights
    # Main gradients lie aligned in their buffer.
    assert found[1] == pytest.approx(sum(gradients.values()), rel=0.01)
    assert found[2] == sum(size for place, size in states.items() if place not in own)


def test_recompute_of_the_feed_forward_part_forgets_its_inner_channels() -> None:
    """Recompute of the dense feed-forward part keeps 3 F elements fewer for each token and layer."""
    model = {**LLAMA, "num_attention_heads": 8, "ffn_hidden_size": 192}
    kept = layer_bytes(tiny(model, {}, bf16=True), 0)
    less = layer_bytes(tiny(model, {}, bf16=True, recompute_granularity="selective", recompute_modules=["mlp"]), 0)
    assert kept - less == 32 * 3 * 192 * 2
    less = layer_bytes(tiny(model, {}, bf16=True, recompute_granularity="selective", recompute_modules=["mlp_act"]), 0)
    assert kept - less == 32 * 192 * 2


def test_a_loss_in_chunks_holds_the_logits_of_one_chunk() -> None:
    """In float32, with a vocabulary of 8 Ki over two ranks and 32 tokens; a batch within one chunk saves nothing."""
    chunks = {"cross_entropy_fusion_impl": "linear", "loss_chunk_size": 8}

    def logits(**training: Any) -> int:
        (rank,) = memory_of_ranks(tiny(LLAMA, {TP: 2}, **training), 8192, 2)
        return rank.bytes_of["logits"]

    inputs = 32 * tiny(LLAMA, {}).model.hidden_size * 4
    assert logits() == 32 * 4096 * 4 + 7 * inputs
    assert logits(**chunks) == 8 * 4096 * 4 + 8 * inputs
    assert logits(**{**chunks, "loss_chunk_size": 64}) == logits() + inputs


def test_a_reference_loss_keeps_a_copy_of_the_logits_in_float32() -> None:
    config = tiny(LLAMA, {}, bf16=True)
    reference = tiny(LLAMA, {}, bf16=True, kernel_backends={"cross_entropy": "reference"})
    (fused,), (copied,) = (memory_of_ranks(each, 8192, 1) for each in (config, reference))
    assert copied.bytes_of["logits"] - fused.bytes_of["logits"] == 32 * 8192 * (4 + 2)


def test_a_cpu_has_no_runtime_of_a_gpu() -> None:
    gpu, cpu = (plan_run(tiny(LLAMA, {TP: 2}), 8192, DEVICES[name], 1, 2).worst.bytes_of for name in ("H100", "CPU"))
    assert (gpu["runtime"], cpu["runtime"]) == (int(0.9 * GIB), int(0.3 * GIB))
    assert gpu["communication"] - cpu["communication"] == int(0.5 * GIB) - int(0.001 * GIB)


def test_a_run_with_little_room_is_tight() -> None:
    config, device = tiny(LLAMA, {TP: 2}), DEVICES["H100"]
    needed = plan_run(config, 8192, device, 1, 2).worst.total
    plans = [plan_run(config, 8192, replace(device, memory=int(needed * room)), 1, 2) for room in (0.99, 1.1, 1.26)]
    assert [plan.verdict for plan in plans] == ["does not fit", "tight", "fits"]
    assert [plan.fits for plan in plans] == [False, True, True]
    assert ["tight: " in " ".join(plan.remarks) for plan in plans] == [False, True, False]


def test_the_channels_of_alibi_are_kept_and_computed() -> None:
    model = {**LLAMA, "num_attention_heads": 8, "ffn_hidden_size": 192}
    plain, wider = (tiny({**model, "position_embedding_type": kind}, {}, bf16=True) for kind in ("none", "alibi"))
    groups = plain.model.query_groups
    assert layer_bytes(wider, 0) - layer_bytes(plain, 0) == 32 * (8 + groups) * 8 * 2
    width = plain.model.head_dim
    ratio = score_cost(wider.model, 0, 32) / score_cost(plain.model, 0, 32)
    assert ratio == pytest.approx((2 * width + 8) / (2 * width))
    assert score_flops(wider.model, 0, 32) == score_flops(plain.model, 0, 32)


def gpt_13b(**training: Any) -> TrainConfig:
    return build_config(
        {
            "model": {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "attention_backend": "unfused"},
            "parallel": {TP: 4, PP: 8},
            "training": {"train_iters": 1, "seq_length": 2048, "global_batch_size": 512, "fp16": True, **training},
            "optimizer": {"lr": 1e-4},
        }
    )


def test_13b_with_scores_in_memory_fits_on_32_v100_with_recompute_only() -> None:
    device = find_device("V100", 16)
    assert device is not None
    full = plan_run(gpt_13b(recompute_granularity="full", recompute_method="uniform"), 51200, device, 8, 4)
    assert full.fits and full.why_not is None
    plain = plan_run(gpt_13b(), 51200, device, 8, 4)
    assert not plain.fits and not plain.cannot_fit
    assert plain.why_not is not None and "activations" in plain.why_not
    change = remedy(plain, 8, 4)
    assert change is not None and change[1].fits


def test_only_unfused_attention_with_dropout_keeps_scores() -> None:
    plain = tiny({**LLAMA, "num_attention_heads": 8}, {TP: 2}, bf16=True)
    dropout = {**LLAMA, "attention_dropout": 0.1}
    kept = {
        (backend, recomputes): layer_bytes(
            tiny({**dropout, "attention_backend": backend}, {TP: 2}, bf16=True, recompute_granularity=recomputes), 0
        )
        for backend in ("auto", "fused", "unfused", "local")
        for recomputes in (None, "selective")
    }
    # Two keys per head and query, of which the masks are drawn again; 4 heads on a rank.
    without = layer_bytes(plain, 0)
    assert kept["auto", None] == kept["auto", "selective"] == kept["fused", None] == without + 32 * 4 * 8
    # With scores nothing of a kernel is kept. Probabilities before and after dropout, a byte of the mask, and the
    # result in the order of heads, all of which recompute forgets.
    assert kept["unfused", "selective"] == without - 32 * 4 * 4
    in_order_of_heads = 32 * 4 * plain.model.head_dim * 2
    assert kept["unfused", None] - kept["unfused", "selective"] == (2 * 2 + 1) * 4 * 32 * 32 + in_order_of_heads
    assert kept["local", None] == kept["unfused", None] > kept["auto", None]


def test_first_rank_of_1f1b_keeps_most_micro_batches() -> None:
    ranks = memory_of_ranks(tiny(LLAMA, {PP: 2}), VOCAB, 2)
    assert ranks[0].bytes_of["activations"] > ranks[1].bytes_of["activations"]
    assert ranks[0].bytes_of["logits"] == 0 < ranks[1].bytes_of["logits"]


def test_backward_of_a_layer_holds_gradients_of_its_inner_channels() -> None:
    """On a stage without logits; of two products before SwiGLU, F each, and the residual stream."""
    first, last = memory_of_ranks(tiny(LLAMA, {PP: 2}, bf16=True), 8192, 2)
    model = tiny(LLAMA, {}).model
    assert first.bytes_of["backward"] == 32 * (2 * model.ffn_size + model.hidden_size) * 2
    # Logits are gone by then.
    assert last.bytes_of["backward"] == 0 < last.bytes_of["logits"]


def test_scores_are_drawn_again_or_have_gradients_in_backward() -> None:
    model = {**LLAMA, "attention_dropout": 0.1, "attention_backend": "unfused"}
    scores, stream = 8 * 1024**2, 1024 * 64 * 2
    config, replayed = (
        tiny(model, {}, bf16=True, seq_length=1024, recompute_granularity=each) for each in (None, "selective")
    )
    inner = 1024 * 3 * config.model.ffn_size * 2
    assert backward_bytes(config, 0) == 2 * 2 * scores - stream - inner
    assert backward_bytes(replayed, 0) == 8 * scores + stream


def test_a_loss_of_the_users_own_needs_the_logits_of_the_whole_vocabulary() -> None:
    plain = tiny(LLAMA, {TP: 2}, micro_batch_size=1)
    own = plain.model_copy(update={"hooks": HooksConfig(loss_function="my_hooks:loss")})
    logits = [memory_of_ranks(config, VOCAB, 2)[0].bytes_of["logits"] for config in (plain, own)]
    # Gathered in float32, and a copy, its log-softmax and its gradient.
    assert logits[1] - logits[0] == 32 * VOCAB * (4 + 3 * 4)


@pytest.mark.parametrize("batch", [8, 9, 11, 20])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_the_peak_is_that_of_the_whole_table(schedule: str, batch: int) -> None:
    """Uneven numbers of micro-batches make larger groups of the interleaved schedule."""
    chunks = {"num_virtual_stages_per_pipeline_rank": 2} if schedule == "interleaved" else {}
    config = tiny(LLAMA, {PP: 2, "pipeline_schedule": schedule, **chunks}, global_batch_size=batch)
    short, whole = peak_schedule(config, 2), schedule_of(config, 2)
    for rank in range(2):
        assert kept_activations(short, rank) == kept_activations(whole, rank)
