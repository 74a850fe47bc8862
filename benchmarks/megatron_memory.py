"""Predicted memory beside Megatron-LM's own functional tests.

    python -m benchmarks.megatron_memory MEGATRON_LM [--to PAGE]

MEGATRON_LM is a checkout. Its tests keep, beside a ``model_config.yaml``, the bytes of tensors on the last rank: after
a step, and at the peak.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.import_script import import_script
from trainer.config.errors import ConfigError
from trainer.planning.build_config import build_config
from trainer.planning.estimate.devices import GIB, GPU_OVERHEAD
from trainer.planning.estimate.memory import memory_of_ranks
from trainer.planning.estimate.plan import check_covered
from trainer.planning.schedule.placement import ScheduleError

_PATHS = ("CHECKPOINT_SAVE_PATH", "CHECKPOINT_LOAD_PATH", "DATA_PATH", "TENSORBOARD_PATH", "DATA_CACHE_PATH")
_SIZE = re.compile(r"_(\d+)N(\d+)G")
_NODE = 8
"""Devices of a test whose name does not tell them."""
_VOCABULARY = 50257
"""GPT-2's, which the tests' tokenizer has unless the config names a size."""
_LARGE = 8 * GIB
"""States from which on constants such as workspaces do not matter."""
PAGE = """# Memory beside Megatron-LM's tests

`python -m benchmarks.megatron_memory MEGATRON_LM --to PAGE` makes this page, here from NVIDIA/Megatron-LM@d98e8a64. Its
functional tests keep the bytes of all tensors of the last rank after a step (states) and at the peak. Their
`model_config.yaml` is read as `llmctl import-script` reads it. It is the memory of another trainer, of models so small
that workspaces of some ten MB are a part of it: the difference in MB says more than a share, but for the large models.

"""


@dataclass(frozen=True)
class Golden:
    """One file of recorded values, and the prediction for the last rank.

    Attributes:
        case: folder of the test.
        file: its name.
        pp: pipeline ranks.
        states: recorded and predicted bytes of weights, gradients and optimizer states.
        peak: recorded and predicted bytes of all tensors.
    """

    case: str
    file: str
    pp: int
    states: tuple[float, float]
    peak: tuple[float, float]


def main() -> None:
    """Print the tables, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="checkout of Megatron-LM")
    parser.add_argument("--to", type=Path, help="write this page")
    options = parser.parse_args()
    reasons: Counter[str] = Counter()
    rows = list(goldens_of(options.folder / "tests/functional_tests/test_cases", reasons))
    text = "\n".join(tables(rows, reasons))
    print(text)
    if options.to is not None:
        options.to.write_text(f"{PAGE}{text}\n", encoding="utf-8")


def goldens_of(folder: Path, reasons: Counter[str]) -> Iterator[Golden]:
    """The recorded values of tests that the trainer can train; ``reasons`` counts the others."""
    for path in sorted(folder.glob("*/*/model_config.yaml")):
        files = sorted(path.parent.glob("golden_values_*.json"))
        try:
            script = import_script(path, path.name, _given(path), datetime(2026, 1, 1, tzinfo=timezone.utc))
            config = build_config(dict(script.sections))
            check_covered(config)
            ranks = memory_of_ranks(config, config.model.vocab_size or _VOCABULARY, _devices(path), GPU_OVERHEAD)
        except ScriptError:
            reasons["not imported"] += len(files)
            continue
        except (ConfigError, ScheduleError):
            reasons["no estimate"] += len(files)
            continue
        last = ranks[-1]
        for file in files:
            states, peaks = (_values(file, key) for key in ("mem-allocated-bytes", "mem-max-allocated-bytes"))
            if not states or not peaks:
                reasons["no memory recorded"] += 1
                continue
            case = f"{path.parent.parent.name}/{path.parent.name}"
            pp = config.parallel.pipeline_model_parallel_size
            yield Golden(case, file.name, pp, (median(states), last.states), (max(peaks), last.tensors))


def _given(path: Path) -> dict[str, str]:
    text = path.read_text(encoding="utf-8")
    return {name: f"/made/{name.lower()}" for name in _PATHS if f"${name}" in text or f"${{{name}}}" in text}


def _devices(path: Path) -> int:
    found = _SIZE.search(path.parent.name)
    return int(found[1]) * int(found[2]) if found else _NODE


def _values(file: Path, key: str) -> list[float]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))[key]["values"].values()
    except (ValueError, KeyError, TypeError):
        return []
    return [float(value) for value in values if value != "nan"]


def tables(rows: Sequence[Golden], reasons: Counter[str]) -> Iterator[str]:
    """Differences by the number of pipeline ranks; the large models; files left out."""
    yield "| pipeline ranks | files | tests | states, MB more | of them | peak, MB more | of it |"
    yield "|---" * 7 + "|"
    for pp in sorted({row.pp for row in rows}):
        own = [row for row in rows if row.pp == pp]
        cells = [str(pp), str(len(own)), str(len({row.case for row in own}))]
        for pairs in ([row.states for row in own], [row.peak for row in own]):
            cells.append(f"{median(recorded - predicted for recorded, predicted in pairs) / 1e6:.0f}")
            cells.append(f"{100 * median(1 - predicted / recorded for recorded, predicted in pairs):.0f}%")
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| test of a large model | file | states GiB | predicted | peak GiB | predicted |"
    yield "|---" * 6 + "|"
    for row in rows:
        if row.states[1] > _LARGE:
            values = [*row.states, *row.peak]
            yield f"| {row.case} | {row.file} | {' | '.join(f'{value / GIB:.2f}' for value in values)} |"
    yield ""
    yield "Files left out: " + ", ".join(f"{count} {why}" for why, count in sorted(reasons.items())) + "."


if __name__ == "__main__":
    main()
