"""``python -m trainer COMMAND``: the one place of the trainer that reads the environment.

The order matters: who we are, then where our output goes, and only then the command's module and with it torch, so
that whatever a rank prints, warnings of imports included, is in that rank's own file.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from trainer.process.launch_environment import LaunchEnvironment, LaunchError, resolve_launch_environment
from trainer.process.rank_log import ConsoleCopy, redirect_output
from trainer.process.run_directory import RunDirectory

# command -> (module, what it does). The module has main(arguments); of those that must know the environment
# main(arguments, environment), and of the parallel ones main(arguments, launch, run, environment).
COMMANDS = {
    "pretrain": ("trainer.commands.pretrain", "train a model: --config FILE and Megatron-LM's flags"),
    "data prepare": ("trainer.data.commands.preprocess", "what llmctl data prepare runs"),
    "data inspect": ("trainer.data.commands.inspect_command", "what llmctl data inspect runs"),
    "data merge": ("trainer.data.commands.merge", "what llmctl data merge runs"),
    "data train-tokenizer": ("trainer.data.commands.train_tokenizer", "what llmctl data train-tokenizer runs"),
    "masked-samples": ("trainer.data.masked.masked_command", "show what BERT or T5 would be given of a .bin/.idx pair"),
    "generate": ("trainer.commands.generate", "continue a prompt with a checkpoint"),
    "evaluate": ("trainer.commands.evaluate", "loss and perplexity of a checkpoint on held-out text"),
    "draw-pipeline": ("trainer.commands.draw_pipeline", "paint a pipeline schedule with its bubble, here and as SVG"),
    "kernels": ("trainer.ops.tools.command", "build the fused kernels, or say what runs on what and why"),
    "rendezvous": ("trainer.process.rendezvous", "print a free port for the ranks of a job to meet at"),
}
_PARALLEL = ("pretrain",)
_ENCODING = ("data prepare", "pretrain")
_WITH_ENVIRONMENT = ("generate", "evaluate", "kernels", "masked-samples")

_USAGE = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code of the process."""
    words = 2 if arguments[:1] == ["data"] else 1
    name, rest = " ".join(arguments[:words]) or "--help", arguments[words:]
    if name in ("-h", "--help"):
        print("usage: python -m trainer COMMAND ...\n")
        for command, (_, what) in COMMANDS.items():
            print(f"  {command:20} {what}")
        return 0
    if name not in COMMANDS:
        print(f"trainer: unknown command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return _USAGE
    if name in _ENCODING:
        # In several processes; threads of the tokenizers library in each would only be in each other's way.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if name in _PARALLEL:
        return _run_parallel(COMMANDS[name][0], rest)
    try:
        module = importlib.import_module(COMMANDS[name][0])
        return int(module.main(rest, os.environ) if name in _WITH_ENVIRONMENT else module.main(rest))
    except KeyboardInterrupt:
        # Users know the data commands as those of llmctl.
        print(f"{'llmctl' if words == 2 else 'trainer'} {name}: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run_parallel(module: str, arguments: Sequence[str]) -> int:
    try:
        launch = resolve_launch_environment(os.environ)
        run = RunDirectory.from_variables(os.environ)
    except (LaunchError, ValueError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return _USAGE
    console = None
    if run is not None:
        console = redirect_output(run.rank_log(launch.rank), also_console=launch.rank == 0)
    _complete_environment(launch)
    try:
        code = int(importlib.import_module(module).main(arguments, launch, run, os.environ))
    except KeyboardInterrupt:
        # While torch is imported, or what ends is ended.
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        print("trainer: interrupted", file=sys.stderr)
    if code:
        _leave_at_once(code, console)
    return code


def _leave_at_once(code: int, console: ConsoleCopy | None) -> NoReturn:
    # After a failure a collective may be pending whose other side is dead; the interpreter's own end would wait for
    # it until the timeout, and the launcher with it.
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
    # What leaves has its own exit code. A launcher that ends all at the first failure would put its signal in the place
    # of it, and srun takes the highest for that of all.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(status)
