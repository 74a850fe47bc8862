"""Attach to the node of a job by ssh, for schedulers without a way of their own."""

import base64
import os
import shlex
from collections.abc import Sequence

_ENTER = 'mapfile -d "" -t words < <(base64 -d <<<{words}); exec bash -c "${{words[@]}}"'
"""Run on a node. One line of plain characters, for the user's login shell reads it first, and that may be a csh."""
_CHOOSE = 'if [[ -t 0 ]]; then exec ssh -t "$@"; fi; exec ssh -T "$@"'


def ssh_argv(host: str, script: str, command: Sequence[str]) -> list[str]:
    """Run a script on a node, in a terminal if there is one here.

    Args:
        host: name of the node.
        script: text for bash.
        command: its arguments.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in (script, "bash", *command))
    line = _ENTER.format(words=base64.b64encode(words).decode())
    return ["bash", "-c", _CHOOSE, "bash", host, f"exec bash -lc {shlex.quote(line)}"]
