"""Make every system call of a synchronous and an asynchronous save fail, and resume from what is left.

One command: ``python -m tests.save_faults``, as ``make torture`` runs it. Each case is one call on a path in the folder
of checkpoints, and EIO, ENOSPC or SIGKILL instead of it. After an error the run must go on. What is left just after
the save must hold a checkpoint whose every byte agrees with its checksums: the older one, or the new one, which it must
be if the save was told as complete. A new process must go on from it, and end with the bits of a run that was never
interrupted. The table counts the cases by call.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.resume_torture import build_kernels
from tests.save_faults.attached import lack_of_strace
from tests.save_faults.broken_saves import BrokenSaves, table

WAYS = {"synchronous": False, "asynchronous": True}


def main():
    """Run all cases; 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try one case of so many")
    options = parser.parse_args()
    lack = lack_of_strace()
    if lack is not None:
        print(f"saves with failing system calls were not tried: {lack}")
        return 0
    build_kernels()
    began, results, problems = time.monotonic(), {}, []
    with tempfile.TemporaryDirectory(prefix="save-faults-") as folder:
        for way, is_async in WAYS.items():
            saves = BrokenSaves(Path(folder) / way, is_async)
            for fault in saves.faults()[:: options.every]:
                try:
                    results[way, fault] = saves.try_fault(fault)
                except AssertionError as problem:
                    problems.append(f"{way} save, {fault.call} {fault.number} {fault.error}: {problem}")
                    print(problems[-1], flush=True)
    print(table(results))
    print(f"{len(results)} cases as they should be, {len(problems)} not ({time.monotonic() - began:.0f} s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
