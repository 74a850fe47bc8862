"""``llmctl plan --search``: the table of the fastest layouts, and the best one as a config."""

from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.cli.console import print_json
from llmctl.cli.planning.prediction import limits_text
from llmctl.cli.planning.written_files import write_file
from llmctl.context import say
from llmctl.submit.preview.search import FoundLayout, search
from trainer.planning.estimate.candidates import fixed_batch

if TYPE_CHECKING:
    from llmctl.submit.preview.predict import PlanInputs

_GIB = 1 << 30


def show_search(inputs: "PlanInputs", output: str | None, *, as_json: bool) -> int:
    """Print the layouts; 1 if none fits."""
    found, best = search(inputs)
    for key, value in fixed_batch(inputs.training, inputs.nodes * inputs.gpus_per_node).items():
        say(f"{key}: is unset; all layouts have {value}")
    if as_json:
        print_json(found.as_json())
    elif found.layouts:
        for line in _lines(found.layouts):
            print(line)
    hardware = f"{inputs.nodes} x {inputs.gpus_per_node} {inputs.device.name}"
    if best is None:
        nearest = found.nearest
        if nearest is None:
            say(f"no layout of {hardware} goes with this model and batch")
        else:
            needed, has = nearest.peak_memory_bytes / _GIB, inputs.device.memory / _GIB
            said = f"{nearest.layout} needs at least {needed:.1f} GiB of {has:.1f}, the others more"
            say(f"no layout fits on {hardware}: {said}")
        return 1
    if output is not None:
        import yaml

        write_file(Path(output), "--output", yaml.safe_dump(dict(best), sort_keys=False))
        say(f"best layout: {output}")
    return 0


def _lines(layouts: list[FoundLayout]) -> list[str]:
    costs = [each.cost for each in layouts]
    unit = next((cost["unit"].upper() for cost in costs if cost is not None), "")
    lines = [f"{'TOKENS/S':>10}  {'STEP S':>8}  {'GIB':>6}  {f'{unit:>10}  ' if unit else ''}LAYOUT"]
    for each in layouts:
        cost = f"{each.cost['points']:>10,.0f}  " if each.cost is not None else ""
        lines.append(
            f"{each.tokens_per_s_per_device:>10,.0f}  {each.iteration_time_s:>8.3g}  "
            f"{each.peak_memory_bytes / _GIB:>6.1f}  {cost}{each.layout}{', tight' if each.tight else ''}"
        )
        lines += [f"{'':>28}  {line}" for line in _reasons(each)]
    return lines


def _reasons(row: FoundLayout) -> list[str]:
    named = limits_text(row.limits)
    lines = [f"of the step: {named}"] if named else []
    if row.faster is not None:
        lines.append(f"faster, with at least {row.faster.peak_memory_bytes / _GIB:.1f} GiB: {row.faster.layout}")
    return lines
