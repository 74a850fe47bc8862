"""Run a command several times beside processes that only use the processors, and print a table of the runs.

    python scripts/beside_load.py --loops 6 --runs 2 make test

The loops have a session of their own, as the work of another user has. The exit code is 1 if a run failed.
"""

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LOOPS = "for ((i = 1; i < {count}; i++)); do while :; do :; done & done; while :; do :; done"


@contextmanager
def load(count: int) -> Iterator[None]:
    """Busy loops in another session, for the time of a ``with`` block."""
    if not count:
        yield
        return
    loops = subprocess.Popen(["bash", "-c", LOOPS.format(count=count)], start_new_session=True)
    try:
        yield
    finally:
        os.killpg(loops.pid, signal.SIGKILL)
        loops.wait()


def run_once(command: Sequence[str]) -> tuple[int, list[str]]:
    """Exit code, and the lines with numbers of tests; passes the command's output on."""
    found = []
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        # The last line of pytest, and the names of failed tests.
        if re.search(r"\d+ (passed|failed|errors?)\b.* in [\d.]+s|^(FAILED|ERROR) ", line):
            found.append(line.strip("= \n"))
    return process.wait(), found


def cpu_s() -> float:
    """CPU time of all children that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Run the command, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=6, help="busy processes beside the command (default: 6)")
    parser.add_argument("--runs", type=int, default=1, help="runs one after another (default: 1)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("give the command to run, such as: make test")
    rows = ["| run | busy processes | exit code | wall, s | CPU, s | tests |", "|---|---|---|---|---|---|"]
    failed = False
    for run in range(1, options.runs + 1):
        with load(options.loops):
            begin, before = time.monotonic(), cpu_s()
            code, found = run_once(options.command)
            wall, used = time.monotonic() - begin, cpu_s() - before
        failed = failed or code != 0
        rows.append(f"| {run} | {options.loops} | {code} | {wall:.0f} | {used:.0f} | {'; '.join(found)} |")
    print("\n".join(["", f"`{' '.join(options.command)}`, {os.cpu_count()} processors", "", *rows]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
