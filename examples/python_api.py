"""A run from Python: its plan, the training, its losses, a resume that goes on, and a cancel.

    python examples/python_api.py [CLUSTER]

Trains a tiny model on generated data for seconds, by default on this machine.
"""

import sys

import llmctl

CONFIG = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2},
    "training": {"train_iters": 20, "seq_length": 64, "micro_batch_size": 2},
    "optimizer": {"lr": 1.0e-3},
    "data": {"mock_data": True},
    "checkpoint": {"save_interval": 10},
}


def main(cluster: str) -> None:
    """Plan, train, resume and cancel."""
    predicted = llmctl.plan(CONFIG, cluster=cluster, set={"model.vocab_size": 256})
    print(f"predicted: {predicted.iteration_time_s:.3g} s per iteration, fits: {predicted.fits}")
    planned = llmctl.dry_run(CONFIG, cluster=cluster, name="from-python")
    print(*planned.messages, f"would run in {planned.run_dir}", sep="\n")

    run = llmctl.submit(CONFIG, cluster=cluster, name="from-python")
    run.wait()
    show_losses(run)

    # Twenty more iterations, from the checkpoint of the twentieth.
    run.resume(set={"training.train_iters": 40}).wait()
    show_losses(run)

    run.resume(set={"training.train_iters": 1_000_000})
    try:
        run.wait(timeout=1)
    except llmctl.WaitTimeout as error:
        print(error)
    print(run.cancel().sentence)


def show_losses(run: llmctl.Run) -> None:
    """Print the first and the last loss."""
    rows = run.metrics("lm_loss")
    first, last = rows["lm_loss"][0], rows["lm_loss"][-1]
    print(f"{run.run_id}: {len(rows['iteration'])} iterations, loss {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "local")
    except llmctl.LlmctlError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
