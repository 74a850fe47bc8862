"""Program on the login node that runs a command on the user's terminal. Standard library only, Python 3.7.

The program waits for the command and reports its end as an exit status, because ssh has no portable way to report an
end by a signal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from llmctl.transport.commands import run_on_terminal
from llmctl.transport.ssh.login_environment import login_environment


def main(argv: Sequence[str], cwd: str | None) -> None:
    """Run a command in a login shell's environment, and exit with its exit status."""
    environment = login_environment(os.environ)
    terminal = os.environ.get("TERM")
    if terminal is not None:
        environment["TERM"] = terminal  # of this session; a login shell without a terminal may set another value
    try:
        status = run_on_terminal(argv, env=environment, cwd=cwd or os.path.expanduser("~"))  # noqa: PTH111
    except OSError as error:
        print(f"llmctl: {argv[0]}: cannot be started: {error.strerror}", file=sys.stderr)
        status = 127
    sys.stderr.flush()
    os._exit(status)
