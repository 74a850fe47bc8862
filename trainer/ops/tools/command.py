"""``python -m trainer kernels build|doctor``: build or explain the kernels.

Exit codes: 0 success, 2 bad flags, 3 failed build, bad environment or missing torch, 130 interrupted, 141 the reader of
the output has closed the pipe, as after SIGPIPE.
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
    "build": ("trainer.ops.tools.build_command", "compile missing kernels for this machine"),
    "doctor": ("trainer.ops.tools.doctor", "backend of every operation here, and reasons against better backends"),
}
"""Name -> module, which may import torch and has main(arguments, settings), and help text."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one subcommand.

    Args:
        arguments: name and flags of the subcommand.
        environment: environment of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m trainer kernels", description="Fused kernels of csrc/.")
    named = parser.add_subparsers(dest="name", required=True, metavar="|".join(SUBCOMMANDS))
    for name, (_, what) in SUBCOMMANDS.items():
        named.add_parser(name, help=what, add_help=False)
    name = parser.parse_known_args(arguments[:1])[0].name
    if importlib.util.find_spec("torch") is None:
        print(f"trainer kernels: {sys.executable} has no torch; install it first", file=sys.stderr)
        return 3
    try:
        settings = BuildSettings.from_variables(environment)
        code = int(importlib.import_module(SUBCOMMANDS[name][0]).main(arguments[1:], settings))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"trainer kernels: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, such as head, has closed the pipe. The interpreter would flush again at exit, and print an error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        return 128 + signal.SIGPIPE
