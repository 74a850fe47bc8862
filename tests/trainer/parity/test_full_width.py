"""One run with every axis, ZeRO-1 and recompute, saved and resumed on another layout.

Every iteration is compared with one rank on the weights of the run's own checkpoint before this iteration, and every
step with AdamW in float64 on the run's own moments. Two runs of six iterations are not comparable: where a gradient is
next to nothing, AdamW turns its rounding into a step, and all later numbers depend on the processor.
"""

import json

import numpy as np
import pytest
import torch

from tests.trainer.parity.deviation import LIMITS
from tests.trainer.training.pretraining_job import Job
from trainer.checkpoint.directory import checkpoint_path, complete_iterations
from trainer.checkpoint.load import read_training_state, resume_optimizer
from trainer.data.loading.build import build_data
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.distributed.random_streams import StepRandomness
from trainer.optimizer.learning_rate import learning_rate
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward, forward_only
from trainer.planning.build_config import build_config

TRAIN_ITERS = 6
VOCAB_SIZE = 250
LIMIT = LIMITS["fp32"]
# A gradient that moments tell has the rounding of a float32 moment, ten times enlarged by 1 / (1 - beta1).
SQUARES = 1e-5


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
            "vocab_size": VOCAB_SIZE,
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
        "checkpoint": {"save_interval": 1},
        "parallel": {"distributed_timeout_minutes": 30.0, **(parallel or {})},
    }
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(values))
    return values


def finish(run, world_size, number=1):
    with Job(run, world_size, number=number) as job:
        codes = job.ends(range(world_size))
    attempt = run / "attempts" / str(number)
    said = "\n".join(path.read_text()[-3000:] for path in sorted(attempt.glob("rank-*.log")))
    assert codes == [0] * world_size, said
    return (attempt / "rank-00000.log").read_text()


def rows_of(run):
    """Metrics by iteration."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["iteration"], {}).update(row)
    return found


class OneRank:
    """One rank that takes the place of a run before or after an iteration."""

    def __init__(self, values):
        self.config = build_config(values)
        mesh = ParallelMesh.build(self.config, 0, 1)
        self.model = build_model(self.config, VOCAB_SIZE, mesh, ProcessGroups(), torch.device("cpu"))
        self.optimizer = MixedPrecisionOptimizer(self.config, self.model)
        self.data = build_data(self.config, 0, 1)

    def load(self, checkpoints, iteration):
        """Load a checkpoint of any layout."""
        metadata = read_training_state(checkpoint_path(checkpoints, iteration), self.model, self.optimizer)
        resume_optimizer(metadata, self.model, self.optimizer)

    def state(self):
        """Weights and moments in float64, by their global names."""
        kinds = {**self.optimizer.tensors(), "weight": {s.name: s.weight for s in self._shards()}}
        return {kind: {name: numbers(tensor) for name, tensor in named.items()} for kind, named in kinds.items()}

    def learn(self, iteration):
        """Loss per token and gradients of an iteration, counted from 0."""
        batch_size, training = self.config.global_batch_size(1), self.config.training
        tokens = batch_size * training.seq_length
        loss = forward_backward(
            self.model,
            self.data.micro_batches("train", iteration * batch_size),
            valid_tokens=tokens,
            loss_scale=1.0,
            randomness=StepRandomness(training.seed, iteration),
        )
        return float(loss) / tokens, {shard.name: numbers(shard.gradient) for shard in self._shards()}

    def valid_loss(self):
        """Loss per token of the one batch that the run evaluates."""
        batches = self.data.micro_batches("valid", 0)
        return float(forward_only(self.model, batches)) / sum(batch.valid_tokens for batch in batches)

    def _shards(self):
        return self.model.gradients.parameter_shards


def numbers(tensor):
    return tensor.detach().double().numpy().copy()


def off(found, right):
    """Worst element against the largest."""
    assert right.any()
    worst = np.abs(found - right).max() / np.abs(right).max()
    return worst if np.isfinite(worst) else np.inf


def check_gradients(beta1, before, after, right):
    """Compare gradients after clipping, which the first moments tell, with those of one rank."""
    for name, gradient in right.items():
        found = (after["exp_avg"][name] - beta1 * before["exp_avg"][name]) / (1 - beta1)
        assert off(found, gradient) <= LIMIT["gradient"], name


def check_step(rank, number, before, after):
    """Compare the moments and weights after step ``number``, counted from 1, with AdamW in float64."""
    options = rank.config.optimizer
    beta1, beta2 = options.adam_beta1, options.adam_beta2
    rate = learning_rate(number - 1, options, TRAIN_ITERS)
    for name, layout in rank.model.layouts.items():
        gradient = (after["exp_avg"][name] - beta1 * before["exp_avg"][name]) / (1 - beta1)
        squares = beta2 * before["exp_avg_sq"][name] + (1 - beta2) * gradient**2
        assert off(after["exp_avg_sq"][name], squares) <= SQUARES, name
        denominator = np.sqrt(after["exp_avg_sq"][name] / (1 - beta2**number)) + options.adam_eps
        weight = before["weight"][name] * (1 - rate * (options.weight_decay if layout.decay else 0.0))
        weight -= rate * after["exp_avg"][name] / (1 - beta1**number) / denominator
        assert off(after["weight"][name], weight) <= LIMIT["update"], name


@pytest.mark.timeout(1800)
def test_a_run_on_every_axis_resumes_on_another_layout_with_the_iterations_of_one_rank(tmp_path):
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
    assert complete_iterations(moved / "checkpoints") == [1, 2, 3]
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
    found = rows_of(moved)
    assert found.keys() == set(range(1, TRAIN_ITERS + 1))
    rank = OneRank(write_config(tmp_path / "alone"))
    options = rank.config.optimizer
    before = rank.state()
    for iteration, row in found.items():
        loss, gradients = rank.learn(iteration - 1)
        norm = np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
        assert row["lm_loss"] == pytest.approx(loss, abs=LIMIT["loss"], rel=0)
        assert row["grad_norm"] == pytest.approx(norm, rel=LIMIT["grad_norm"])
        rank.load(moved / "checkpoints", iteration)
        after = rank.state()
        clipping = max(1.0, norm / options.clip_grad)
        check_gradients(options.adam_beta1, before, after, {name: g / clipping for name, g in gradients.items()})
        check_step(rank, iteration, before, after)
        if iteration % 3 == 0:
            assert row["valid_loss"] == pytest.approx(rank.valid_loss(), abs=LIMIT["loss"], rel=0)
        before = after
