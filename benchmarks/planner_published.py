"""Predicted speed beside published runs: ``python -m benchmarks.planner_published``.

Rows: Narayanan et al. 2021 (arXiv:2104.04473), table 1: GPT on A100-80GB with full recompute, micro batch 1 assumed.
Its TFLOP/s count the recomputed forward, 96 B s l h^2 (1 + s/6h + V/16lh), and so do the predictions here. The A100's
share of its data sheet (trainer.planning.estimate.devices) was set after the rows with even numbers; the median is over
the odd ones, counted from 1.
"""

from __future__ import annotations

from statistics import median

from trainer.planning.build_config import build_config
from trainer.planning.estimate.devices import DEVICES
from trainer.planning.estimate.plan import plan_run

SEQUENCE, VOCABULARY = 2048, 51200
# Layers, width, heads, tp, pp, GPUs, batch, published TFLOP/s per GPU.
ROWS = (
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (30, 3072, 32, 2, 1, 64, 512, 138),
    (36, 4096, 32, 4, 1, 128, 512, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 135),
    (48, 8192, 64, 8, 2, 512, 1536, 138),
    (60, 10240, 80, 8, 4, 1024, 1792, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 148),
    (96, 16384, 128, 8, 16, 1920, 2160, 155),
    (105, 20480, 128, 8, 35, 2520, 2520, 163),
    (128, 25600, 160, 8, 64, 3072, 3072, 163),
)


def predicted(row: tuple[int, ...]) -> tuple[float, bool]:
    """TFLOP/s per GPU in the paper's count, and whether the run fits."""
    layers, hidden, heads, tp, pp, devices, batch, _ = row
    config = build_config(
        {
            "model": {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads},
            "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp},
            "training": {
                "train_iters": 1,
                "seq_length": SEQUENCE,
                "global_batch_size": batch,
                "fp16": True,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
            },
            "optimizer": {"lr": 1e-4},
        }
    )
    plan = plan_run(config, VOCABULARY, DEVICES["A100-80GB"], devices // 8, 8)
    operations = 96 * batch * SEQUENCE * layers * hidden**2
    operations = operations * (1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden))
    return operations / plan.step.total / devices / 1e12, plan.fits


def main() -> None:
    """Print the table and the median error."""
    print("| layers x width | tp | pp | GPUs | published TFLOP/s | predicted | error | fits |")
    print("|---|---|---|---|---|---|---|---|")
    errors = []
    for row in ROWS:
        found, fits = predicted(row)
        errors.append(found / row[-1] - 1)
        layers, hidden, _, tp, pp, devices, _, published = row
        print(
            f"| {layers} x {hidden} | {tp} | {pp} | {devices:,} | {published} | {found:.0f} "
            f"| {100 * errors[-1]:+.0f}% | {'yes' if fits else 'no'} |"
        )
    print(f"\nMedian absolute error of the odd rows: {100 * median(map(abs, errors[::2])):.1f}%.")


if __name__ == "__main__":
    main()
