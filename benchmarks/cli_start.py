"""CPU time (user + system) of starting ``llmctl``, compared with a bare typer program.

    make start
    python -m benchmarks.cli_start --write

CPU time depends less on other load than wall time. The commands take turns, so that load affects all of them, and the
limits are ratios to the help page of the bare program.
"""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BARE = "bare typer, --help"
HELLO = """
import typer
app = typer.Typer()
@app.command()
def hello(name: str = "world") -> None:
    print(f"hello {name}")
app()
"""


def clean_environment(folder: str) -> dict[str, str]:
    """This process's environment with ``folder`` as home and without settings of llmctl."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LLMCTL_", "XDG_"))}
    return kept | {"HOME": folder}


def cpu_ms(argv: list[str], folder: str, environment: dict[str, str] | None = None) -> float:
    """CPU time of one run in milliseconds, in ``environment`` or a clean one.

    Raises:
        RuntimeError: the command failed.
    """
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env=environment or clean_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr
    errors = process.stderr.read()
    # wait4 instead of RUSAGE_CHILDREN, which sums over all children and rounds the difference.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)} exited with code {process.returncode}: {errors.decode()[-500:]}")
    return (usage.ru_utime + usage.ru_stime) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--write", action="store_true", help="also write the table to benchmarks/results")
    flags = parser.parse_args()
    llmctl = str(Path(sys.executable).with_name("llmctl"))
    submit = [llmctl, "submit", "--dry-run", "--cluster", "local", "--run-id", "start"]
    with tempfile.TemporaryDirectory() as folder:
        hello = Path(folder, "hello.py")
        hello.write_text(HELLO)
        commands: dict[str, tuple[list[str], float | None]] = {
            "python -c pass": ([sys.executable, "-c", "pass"], None),
            "bare typer, hello world": ([sys.executable, str(hello)], None),
            BARE: ([sys.executable, str(hello), "--help"], None),
            "llmctl --help": ([llmctl, "--help"], 0.6),
            "llmctl submit --dry-run -- echo hello": ([*submit, "--", "echo", "hello"], 1.3),
            "llmctl submit --dry-run": (submit, 1.3),
            "llmctl submit --dry-run, 512 nodes": ([*submit, "--nodes", "512"], 1.3),
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(flags.runs + 1):
            for name, (argv, _) in commands.items():
                took = cpu_ms(argv, folder)
                if number:  # The first round fills the bytecode caches.
                    times[name].append(took)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    lines = [
        f"# Start of the command line, {today}",
        "",
        f"CPU time (user + system) in ms, median of {flags.runs} runs in turn; Python {platform.python_version()}, "
        f"{platform.platform()}, load average {os.getloadavg()[0]:.1f}.",
        "",
        f"| command | median | least | median / {BARE} | limit |",
        "|---|---|---|---|---|",
    ]
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, (_, limit) in commands.items():
        ratio = medians[name] / medians[BARE]
        lines.append(f"| {name} | {medians[name]:.0f} | {min(times[name]):.0f} | {ratio:.2f} | {limit or ''} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if flags.write:
        results_folder = Path(__file__).with_name("results")
        results_folder.mkdir(exist_ok=True)
        (results_folder / f"cli_start-{today}.md").write_text(text)
    slow = [name for name, (_, limit) in commands.items() if limit and medians[name] > limit * medians[BARE]]
    sys.exit(f"over the limit: {', '.join(slow)}" if slow else 0)


if __name__ == "__main__":
    main()
