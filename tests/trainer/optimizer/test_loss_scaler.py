"""Growth, backoff and hysteresis of the fp16 loss scale, by Megatron-LM's rule."""

import json

from trainer.config.sections.training import TrainingConfig
from trainer.optimizer.loss_scaler import LossScaler


def scaler(**keys):
    return LossScaler.build(
        TrainingConfig(
            train_iters=1,
            seq_length=1,
            **{"fp16": True, "initial_loss_scale": 1024.0, "loss_scale_window": 3, "hysteresis": 2, **keys},
        )
    )


def scales(scaler, overflows):
    seen = []
    for overflow in overflows:
        scaler.update(bool(overflow))
        seen.append(scaler.scale)
    return seen


def test_hysteresis_lets_one_overflow_pass():
    assert scales(scaler(), [1, 1, 1]) == [1024.0, 512.0, 256.0]


def test_growth_restores_the_hysteresis():
    assert scales(scaler(), [1, 0, 0, 0, 1, 1]) == [1024.0, 1024.0, 1024.0, 2048.0, 2048.0, 1024.0]


def test_overflow_starts_the_window_anew():
    assert scales(scaler(hysteresis=1), [0, 0, 1, 0, 0, 0]) == [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0]


def test_never_below_the_minimum():
    assert scales(scaler(hysteresis=1, min_loss_scale=400.0), [1, 1, 1]) == [512.0, 400.0, 400.0]


def test_constant_and_absent():
    assert scales(scaler(loss_scale=8.0), [1, 0, 0, 0]) == [8.0] * 4
    assert scales(scaler(fp16=False, bf16=True), [1, 0, 0, 0]) == [1.0] * 4


def test_state_goes_through_json():
    one, other = scaler(), scaler()
    scales(one, [1, 0, 1, 0, 0])
    other.load(json.loads(json.dumps(one.state())))
    assert other == one
    assert scales(one, [0, 1, 1]) == scales(other, [0, 1, 1])


def test_window_shortened_below_the_steps_already_taken_still_ends():
    long, short = scaler(loss_scale_window=10), scaler(loss_scale_window=3)
    scales(long, [0] * 5)
    short.load(long.state())
    assert scales(short, [0, 0, 0, 0]) == [2048.0, 2048.0, 2048.0, 4096.0]


def test_the_present_config_overrides_a_checkpoint():
    constant = scaler(loss_scale=8.0)
    constant.load(scaler().state())
    assert constant.scale == 8.0
