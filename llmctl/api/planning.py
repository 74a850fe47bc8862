"""``plan``: memory, speed and cost of a training run, before anything is queued."""

import os
from collections.abc import Mapping
from typing import Any

from llmctl.api.call import calling, plain
from llmctl.submit.preview.predict import Prediction, plan_inputs, predict


def plan(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    device: str | None = None,
    set: Mapping[str, Any] | None = None,
    calibrated: bool = True,
) -> Prediction:
    """Predict memory, speed and cost of a training run, as ``llmctl plan`` does. Contacts no other machine.

    For a run that does not fit, ``fits`` of the prediction is False; nothing is raised.

    Args:
        config: training config; or the config itself, section by section. None: ``./llmctl.yaml``, else the bundled
            example.
        cluster: name of the profile with the hardware. None: as for the command.
        nodes: number of nodes. None: of the config.
        gpus_per_node: devices per node.
        device: a device by name, such as H100, instead of a cluster's.
        set: values by dotted key, laid over the config.
        calibrated: use the calibration of the cluster, if ``llmctl plan --calibrate`` made one.

    Raises:
        UsageError, ConfigFileError, ProfileError: by flag, file and key, or profile.
    """
    with calling("llmctl.plan") as call:
        inputs = plan_inputs(
            call.context,
            plain(config),
            cluster=cluster,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            device=device,
            settings=plain(set or {}),
            calibrates=calibrated,
        )
        return predict(inputs)[1]
