"""The axis whose messages cross nodes follows the order of the ranks."""

from trainer.planning.build_config import build_config
from trainer.planning.estimate.devices import find_device
from trainer.planning.estimate.plan import plan_run


def exposed_and_table(order: str, nodes: int, per_node: int) -> tuple[float, float]:
    """Seconds of gradient messages, and of the table, of 16 ranks with two stages."""
    config = build_config(
        {
            "model": {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8},
            "parallel": {"pipeline_model_parallel_size": 2, "rank_order": order, "overlap_grad_reduce": False},
            "training": {"train_iters": 1, "seq_length": 1024, "micro_batch_size": 4, "global_batch_size": 64},
            "optimizer": {"lr": 1e-3},
        }
    )
    device = find_device("V100", 16)
    assert device is not None
    step = plan_run(config, 1000, device, nodes, per_node).step
    return step.exposed, step.times.step_time


def test_neighbouring_pipelines_send_gradients_between_nodes() -> None:
    usual = exposed_and_table("tp-cp-ep-dp-pp", 2, 8)
    other = exposed_and_table("tp-cp-ep-pp-dp", 2, 8)
    assert other[0] > usual[0]
    assert other[1] < usual[1]


def test_on_one_node_the_order_changes_no_time() -> None:
    assert exposed_and_table("tp-cp-ep-dp-pp", 1, 16)[0] == exposed_and_table("tp-cp-ep-pp-dp", 1, 16)[0]
