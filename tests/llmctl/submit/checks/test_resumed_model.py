"""``resume --set model.*`` against the checkpoint of the run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmctl.context import Context
from llmctl.errors import UsageError
from llmctl.submit.job import SubmitArguments
from llmctl.submit.plan import plan_submission
from llmctl.submit.plan_resume import plan_resume

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
CONFIG = {
    "model": SHAPE,
    "training": {"train_iters": 2, "seq_length": 16, "micro_batch_size": 1, "device": "cpu"},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}


@pytest.fixture
def resumed(home: Path) -> Any:
    """Plans a resume with settings of a run whose checkpoint has two layers; nothing is started."""
    (home / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    context = Context.of((), (), dict(os.environ), home)
    record = plan_submission(context, SubmitArguments("c.yaml", "local", run_id="r", dry_run=True)).record
    (home / "runs/r/code/trainer").mkdir(parents=True)
    checkpoint = home / "runs/r/checkpoints/iter_0000002"

    def plan(*settings: str, has_checkpoint: bool = True) -> Any:
        if has_checkpoint:
            checkpoint.mkdir(parents=True, exist_ok=True)
            stored = {"config": {"model": SHAPE, "training": {"seq_length": 16}}, "vocab_size": 256}
            (checkpoint / "metadata.json").write_text(json.dumps(stored))
        return plan_resume(context, record, settings=settings, dry_run=True)

    return plan


def test_another_shape_is_refused_with_all_keys(resumed: Any, home: Path) -> None:
    where = home / "runs/r/checkpoints/iter_0000002/metadata.json"
    with pytest.raises(UsageError) as caught:
        resumed("model.num_layers=5", "model.hidden_size=64", "model.vocab_size=300")
    told = str(caught.value)
    assert f"--set model.num_layers: is 5, but {where} has 2; remove the key: a run continues with the model" in told
    assert f"--set model.hidden_size: is 64, but {where} has 32" in told
    assert f"--set model.vocab_size: is 300, but {where} has 256" in told


def test_other_values_and_a_run_without_checkpoint_pass(resumed: Any) -> None:
    assert resumed("model.num_layers=5", has_checkpoint=False).job.config.model.num_layers == 5
    assert resumed("model.hidden_dropout=0.2", "model.num_layers=2", "training.train_iters=9")
