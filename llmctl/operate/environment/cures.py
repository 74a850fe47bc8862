"""The cures that ``llmctl doctor`` names, run one after the other."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.context import Context
from llmctl.doctor.python import Check
from llmctl.errors import LlmctlError
from llmctl.operate.environment.build import build_environment
from llmctl.operate.environment.decide import Asked, plan_environment
from llmctl.submit.render import environment_script

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile


def cures_of(checks: Iterable[Check]) -> list[tuple[str, ...]]:
    """The cures of warnings and faults, each once, in order."""
    return list(dict.fromkeys(check.cure for check in checks if check.cure))


def run_cures(context: Context, profile: "ClusterProfile", cures: Sequence[Sequence[str]]) -> None:
    """Run cures with their output on the terminal. After one that fails, the next is tried; the failure is told."""
    for cure in cures:
        context.tell(f"runs: {shlex.join(cure)}")
        try:
            status = _run(context, profile, cure)
        except LlmctlError as error:
            context.tell(f"llmctl: {error.message}")
            continue
        if status:
            context.tell(f"llmctl: exit status {status}")


def _run(context: Context, profile: "ClusterProfile", cure: Sequence[str]) -> int:
    if cure[0] == "llmctl":
        # The only cure of llmctl's own: env build of this cluster.
        return build_environment(plan_environment(context, profile.name, Asked(), dry_run=False))
    transport = context.connect(profile)
    script = environment_script(profile, replace(context.folders, home=Path(transport.home())))
    return transport.run_interactive(["bash", "-c", script, "bash", *cure])
