"""Variables of a login shell. Standard library only, Python 3.7; runs on the login node.

``ssh HOST COMMAND`` starts no login shell, so the settings of /etc/profile and similar files are missing: at many sites
the PATH to the scheduler's own commands.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping

from llmctl.transport.commands import run_command

_MARK = b"llmctl-environment-follows\n"
_DUMP = 'exec /bin/sh -c "echo llmctl-environment-follows; exec cat /proc/self/environ"'
_TIMEOUT_S = 20.0
_PASSING = frozenset({"_", "PWD", "OLDPWD", "SHLVL"})


def login_environment(plain: Mapping[str, str]) -> dict[str, str]:
    """Variables of the user's login shell; ``plain`` if the shell fails.

    An ``argv[0]`` that begins with a dash makes any shell a login shell (bash(1), zsh(1), tcsh(1), fish(1)).
    """
    shell = plain.get("SHELL") or pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    try:
        done = run_command(
            ["-" + os.path.basename(shell), "-c", _DUMP],  # noqa: PTH119
            env=plain,
            timeout_s=_TIMEOUT_S,
            cwd="/",
            executable=shell,
        )
    except OSError:
        return dict(plain)
    found = done.stdout.rpartition(_MARK)
    variables = {}
    for entry in found[2].split(b"\0") if found[1] else ():
        name, equals, value = entry.partition(b"=")
        if equals and os.fsdecode(name) not in _PASSING:
            variables[os.fsdecode(name)] = os.fsdecode(value)
    return variables or dict(plain)
