"""The ranks that llmctl names from the flight records of nvidia-resiliency-ext, beside those that were injected.

git clone https://github.com/NVIDIA/nvidia-resiliency-ext
python -m benchmarks.flight_records nvidia-resiliency-ext/tests/attribution/unit/fr_traces
"""

import re
import sys
from pathlib import Path

from llmctl.runs.failures.flight_records import find_guilty, parse_record


def main(folder: Path) -> None:
    """Print one row per case."""
    print("| case | injected | named | of a stuck device |\n| --- | --- | --- | --- |")
    for case in sorted(path for path in folder.iterdir() if path.is_dir()):
        ranks = [(int(path.name.rpartition("_")[2]), path.read_bytes()) for path in case.glob("_dump_*")]
        injected = re.findall(r"\d+", (case / "fault_injection.log").read_text().splitlines()[0])
        found = find_guilty([parse_record(rank, data) for rank, data in ranks])
        stuck = [str(one.rank) for one in found if one.is_stuck_device]
        named = [str(one.rank) for one in found]
        print(f"| {case.name} | {', '.join(injected)} | {', '.join(named)} | {', '.join(stuck) or '-'} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
