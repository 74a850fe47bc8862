"""``python -m trainer tune``: the program of the job of ``llmctl tune``, once on each node."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.tuning.contest import Candidate, Contest


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the trials; 0 if a layout has won, 1 if none ran."""
    parser = argparse.ArgumentParser(prog="python -m trainer tune", description=__doc__)
    parser.add_argument("--tuning", required=True, type=Path, help="file with config, candidates, steps and seconds")
    parser.add_argument("--ranks-per-node", required=True, type=int, help="ranks of each node")
    options = parser.parse_args(arguments)
    try:
        folder = Path(environment["LLMCTL_RUN_DIR"])
        node, nodes, port = (int(environment[name]) for name in ("NODE_RANK", "NNODES", "MASTER_PORT"))
        address = environment["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        print(f"trainer tune: {error} is not set as in a job of llmctl; use llmctl tune", file=sys.stderr)
        return 2
    from trainer.tuning.node import Tuning, run_node
    from trainer.tuning.ranks import Place

    given = json.loads(options.tuning.read_text(encoding="utf-8"))
    candidates = [Candidate(**each) for each in given["candidates"]]
    tuning = Tuning(given["config"], candidates, given["steps"], given["seconds"], folder, environment)
    results = run_node(tuning, Place(node, nodes, options.ranks_per_node, address), port)
    if node:
        return 0
    ranking = Contest(candidates, results, given["steps"]).ranking()
    if not ranking:
        print("trainer tune: no layout ran", file=sys.stderr)
        return 1
    best = candidates[ranking[0].candidate]
    print(f"the fastest: {best.name}, {ranking[0].seconds:.3g} s a step")
    return 0
