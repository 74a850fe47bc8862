"""One run through every axis: pipeline, context, experts, ZeRO-1, recompute; saved, and resumed on another layout."""

import json

import pytest

from tests.trainer.training.pretraining_job import Job
from trainer.checkpoint.directory import complete_iterations

TRAIN_ITERS = 6
DEADLINE_S = 400.0


def write_config(run, parallel=None, exit_interval=None, **training):
    values = {
        "model": {
            "num_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 96,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            "disable_bias_linear": True,
            "untie_embeddings_and_output_weights": True,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.1,
            "vocab_size": 250,
            "make_vocab_size_divisible_by": 8,
            "num_experts": 4,
            "moe_layer_freq": 2,
            "moe_aux_loss_coeff": 0.01,
            "moe_z_loss_coeff": 0.001,
            "moe_shared_expert_intermediate_size": 32,
        },
        "training": {
            "train_iters": TRAIN_ITERS,
            "seq_length": 32,
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "eval_interval": 3,
            "eval_iters": 1,
            "exit_interval": exit_interval,
            **training,
        },
        "optimizer": {"lr": 3e-3, "lr_warmup_iters": 2, "lr_decay_style": "cosine", "min_lr": 1e-4},
        "data": {"mock_data": True},
        "parallel": {"distributed_timeout_minutes": 3.0, **(parallel or {})},
    }
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(values))


def finish(run, world_size, number=1):
    with Job(run, world_size, number=number) as job:
        codes = job.ends(range(world_size), DEADLINE_S)
    attempt = run / "attempts" / str(number)
    said = "\n".join(path.read_text()[-3000:] for path in sorted(attempt.glob("rank-*.log")))
    assert codes == [0] * world_size, said
    return (attempt / "rank-00000.log").read_text()


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (row["iteration"], name): row[name]
        for row in rows
        for name in ("lm_loss", "grad_norm", "valid_loss")
        if name in row
    }


@pytest.mark.timeout(1200)
def test_a_run_on_every_axis_moves_to_another_layout_and_keeps_the_serial_losses(tmp_path):
    serial = tmp_path / "serial"
    write_config(serial)
    finish(serial, 1)
    moved = tmp_path / "moved"
    first = {
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "pipeline_schedule": "zb-h1",
    }
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    write_config(moved, first, exit_interval=3, **recompute)
    said = finish(moved, 4)
    assert "TP 1 x PP 2 x CP 2 (p2p) x DP 1, EP 2 on 4 x " in said
    assert "pipeline zb-h1, 2 stages of layers " in said
    assert "ZeRO-1: optimizer state divided over 2 ranks; full recompute" in said
    assert complete_iterations(moved / "checkpoints") == [3]
    second = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "zb-v",
    }
    selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe_act"]}
    # Four virtual stages for three layers: the embedding or the head stands alone.
    write_config(moved, second, **selective)
    said = finish(moved, 4, number=2)
    assert "iter_0000003 at iteration 3" in said
    assert "pipeline zb-v, 4 virtual stages of layers " in said
    expected, found = losses(serial), losses(moved)
    assert found.keys() == expected.keys()
    assert {iteration for iteration, name in found if name == "lm_loss"} == set(range(1, TRAIN_ITERS + 1))
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-5 if key[1] != "grad_norm" else 1e-4), key
