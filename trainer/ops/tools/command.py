"""``python -m trainer kernels build|doctor|bench``: build the kernels, say what runs on what and why, or measure.

Exit codes: 0 done, 2 bad flags, 3 they cannot be built here, the environment is at fault, or there is no torch,
130 interrupted, 141 whoever read the output has left before its end, as after the signal SIGPIPE.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from trainer.config.errors import ConfigError
from trainer.ops.build.build_settings import BuildSettings

SUBCOMMANDS = {
    "build": ("trainer.ops.tools.build_command", "compile them for this machine, where that has not been done"),
    "doctor": ("trainer.ops.tools.doctor", "what every operation runs on here, and why not on something better"),
    "bench": ("trainer.ops.tools.bench_command", "how fast every operation is, on every backend and in plain torch"),
}
"""Name -> module and what it does. The module has main(arguments, settings), or of those that start processes
main(arguments, settings, environment); it may import torch."""
_WITH_ENVIRONMENT = ("bench",)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one subcommand.

    Args:
        arguments: its name, and its own flags.
        environment: of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m trainer kernels", description="The fused kernels of csrc/.")
    named = parser.add_subparsers(dest="name", required=True, metavar="|".join(SUBCOMMANDS))
    for name, (_, what) in SUBCOMMANDS.items():
        named.add_parser(name, help=what, add_help=False)
    name = parser.parse_known_args(arguments[:1])[0].name
    if importlib.util.find_spec("torch") is None:
        print(f"trainer kernels: {sys.executable} has no torch; install it first", file=sys.stderr)
        return 3
    try:
        settings = BuildSettings.from_variables(environment)
    except ConfigError as error:
        print(f"trainer kernels: {error}", file=sys.stderr)
        return 3
    try:
        module = importlib.import_module(SUBCOMMANDS[name][0])
        more = (environment,) if name in _WITH_ENVIRONMENT else ()
        code = int(module.main(arguments[1:], settings, *more))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who reads has left, as head does. At its end the interpreter would try once more, and complain.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return 128 + signal.SIGPIPE
