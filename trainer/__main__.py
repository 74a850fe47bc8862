"""``python -m trainer COMMAND``: the only part of the trainer that reads the environment.

The order matters: first find this process's rank, then redirect the output, and only then import the command's module
and with it torch. So everything that a rank prints, import warnings included, lands in the rank's own log file.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if not __package__:
    # Started by its folder, `python PATH/trainer`: this package, whatever else is called trainer on Python's path.
    sys.path[0] = str(Path(sys.path[0]).parent)

from trainer.process.garbage import importing_torch
from trainer.process.launch_environment import LaunchEnvironment, LaunchError, resolve_launch_environment
from trainer.process.orphan import end_with_parent
from trainer.process.rank_log import ConsoleCopy, redirect_output
from trainer.process.run_directory import RunDirectory

# command -> (module, help text). The module has main(arguments), or main(arguments, environment) for the commands in
# _WITH_ENVIRONMENT, or main(arguments, launch, run, environment) for the commands in _PARALLEL.
COMMANDS = {
    "pretrain": ("trainer.commands.pretrain", "Train a model: --config FILE and Megatron-LM's flags."),
    "data prepare": ("trainer.data.commands.preprocess", "The program behind llmctl data prepare."),
    "data inspect": ("trainer.data.commands.inspect_command", "The program behind llmctl data inspect."),
    "data merge": ("trainer.data.commands.merge", "The program behind llmctl data merge."),
    "generate": ("trainer.commands.generate", "Continue prompts with a trained model."),
    "evaluate": ("trainer.commands.evaluate", "Measure a trained model: perplexity of a text, or tasks."),
    "checkpoint": (
        "trainer.commands.checkpoint",
        "The program behind llmctl checkpoint: import, export, show, verify.",
    ),
    "draw-pipeline": ("trainer.commands.draw_pipeline", "Draw a pipeline schedule and its bubble, as text and as SVG."),
    "bench": ("trainer.speed_test.command", "Measure devices and messages; the program behind llmctl env bench."),
    "kernels": ("trainer.ops.tools.command", "Build, inspect and benchmark the fused kernels."),
    "tune": ("trainer.tuning.command", "The program of the job of llmctl tune."),
}
_PARALLEL = ("pretrain", "bench")
_OF_LLMCTL = ("checkpoint", "data")
_ENCODING = ("data prepare", "pretrain")
_WITH_ENVIRONMENT = ("generate", "evaluate", "kernels", "tune")

_HELP = ("-h", "--help")
_USAGE = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code of the process."""
    words = 2 if arguments[:1] == ["data"] else 1
    name, rest = " ".join(arguments[:words]) or "--help", arguments[words:]
    if name in _HELP or (arguments[0] in _OF_LLMCTL and arguments[1:2] and arguments[1] in _HELP):
        from trainer.config.command_parser import print_text

        print_text(_help("" if name in _HELP else arguments[0]))
        return 0
    if name not in COMMANDS:
        print(f"trainer: unknown command {name!r}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return _USAGE
    if name in _ENCODING:
        # These commands encode in several processes; threads of the tokenizers library in each would only compete.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if name in _PARALLEL:
        return _run_parallel(COMMANDS[name][0], rest)
    parent = os.getppid()
    if os.environ.get("LLMCTL_PARENT") == str(parent):
        # llmctl started this command in the foreground. A command that a user started by hand may outlive its shell.
        end_with_parent(parent)
    try:
        with importing_torch():
            module = importlib.import_module(COMMANDS[name][0])
        return int(module.main(rest, os.environ) if name in _WITH_ENVIRONMENT else module.main(rest))
    except KeyboardInterrupt:
        # Users call these commands through llmctl.
        print(f"{'llmctl' if arguments[0] in _OF_LLMCTL else 'trainer'} {name}: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _help(group: str) -> str:
    """Page of the commands that begin with the word ``group``; empty for all."""
    from trainer.config.checkpoint_flags import DESCRIPTIONS
    from trainer.config.help.page import HelpPage, Row, Section, page_width, plain_text, with_help_row

    start = f"{group} " if group else ""
    texts = {name.removeprefix(start): text for name, (_, text) in COMMANDS.items() if name.startswith(start)}
    rows = tuple(Row(*item) for item in (DESCRIPTIONS if group == "checkpoint" else texts).items())
    sections = with_help_row((Section("Commands", rows, is_commands=True),))
    page = HelpPage(f"python -m trainer {start}COMMAND [ARGS]...", ("Programs of jobs; llmctl starts them.",), sections)
    return plain_text(page, page_width())


def _run_parallel(module: str, arguments: Sequence[str]) -> int:
    try:
        launch = resolve_launch_environment(os.environ)
        run = RunDirectory.from_variables(os.environ)
    except (LaunchError, ValueError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return _USAGE
    console = None
    if run is not None:
        # Its parent is its launcher or the supervisor; without a run directory it may be a shell that may go.
        end_with_parent(os.getppid())
        console = redirect_output(run.rank_log(launch.rank), also_console=launch.rank == 0)
    _complete_environment(launch)
    try:
        code = int(importlib.import_module(module).main(arguments, launch, run, os.environ))
    except KeyboardInterrupt:
        # Ctrl-C during the import of torch or during shutdown.
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        print("trainer: interrupted", file=sys.stderr)
    if code or _has_hanging_tracker():
        _leave_at_once(code, console)
    return code


def _has_hanging_tracker() -> bool:
    from trainer.trackers.tracking import has_hanging_tracker

    return has_hanging_tracker()


def _leave_at_once(code: int, console: ConsoleCopy | None) -> NoReturn:
    # After a failure a collective with a dead peer may be pending, and the package of a tracker that hangs has exit
    # handlers. A normal interpreter exit would wait for them, and the launcher would wait too.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if console is not None:
        console.finish()
    os._exit(code)


def _complete_environment(launch: LaunchEnvironment) -> None:
    os.environ.update(launch.as_variables())
    # cuBLAS reads this once, when CUDA starts; without it training.deterministic_mode cannot be honoured
    # (https://docs.nvidia.com/cuda/cublas/#results-reproducibility).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # Keep this process's own exit code. A launcher that terminates all ranks at the first failure would replace the
    # code by its signal, and srun reports the highest exit code of all ranks.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(status)
