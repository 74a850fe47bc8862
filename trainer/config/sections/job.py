"""Section ``job``: the request to the cluster."""

from typing import Literal

from pydantic import PositiveInt

from trainer.config.sections.section import Section


class JobConfig(Section):
    """Resources that ``llmctl submit`` requests from the cluster.

    The trainer itself reads none of these keys.
    """

    name: str | None = None
    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt | None = None
    time: str | None = None
    group: str | None = None
    resource_type: str | None = None
    queue: str | None = None
    reservation: str | None = None
    priority: int | None = None
    exclude: list[str] = []
    container: str | None = None
    mounts: list[str] = []
    launcher: Literal["torchrun", "srun", "mpirun"] | None = None
    env: dict[str, str] = {}
    secrets: list[str] = []
    code: list[str] = []
