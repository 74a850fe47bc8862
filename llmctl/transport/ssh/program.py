"""Programs for a host, sent with the sources of all their modules. Nothing is installed on the host."""

import base64
import zlib
from collections.abc import Sequence
from pathlib import Path

from llmctl.errors import SchedulerError

# Program -> our modules that it needs, each after the modules that it imports.
_MODULES = {
    "llmctl.transport.ssh.agent_program": (
        "supervisor.trust",
        "supervisor.bad_nodes.entries",
        "transport.file_reads",
        "transport.file_writes",
        "transport.processes",
        "transport.commands",
        "transport.ssh.frames",
        "transport.ssh.login_environment",
        "transport.ssh.agent_program",
    ),
    "llmctl.transport.ssh.session_program": (
        "transport.processes",
        "transport.commands",
        "transport.ssh.login_environment",
        "transport.ssh.session_program",
    ),
}


def program(module: str, *arguments: object) -> bytes:
    """Self-contained Python program that calls ``main`` of one of our modules.

    Args:
        module: full name of the module.
        arguments: of ``main``: text, numbers, None, and lists of these.
    """
    folder = Path(__file__).parents[2]
    sources = [
        (f"llmctl.{name}", (folder / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
        for name in _MODULES[module]
    ]
    return f"""\
import sys, types
def add(name):
    module = sys.modules[name] = types.ModuleType(name)
    parent, _, last = name.rpartition(".")
    if parent: setattr(sys.modules[parent], last, module)
    return module
for name in ("llmctl", "llmctl.supervisor", "llmctl.supervisor.bad_nodes", "llmctl.transport", "llmctl.transport.ssh"):
    add(name).__path__ = []
for name, source in {sources!r}:
    exec(compile(source, name, "exec"), add(name).__dict__)
sys.modules[{module!r}].main(*{arguments!r})
""".encode("utf-8", "surrogateescape")


def session_command(python: str, argv: Sequence[str], cwd: str | None) -> str:
    """Command line, for any login shell, that runs ``argv`` on the session's terminal.

    Raises:
        SchedulerError: the interpreter's path cannot be quoted for every shell.
    """
    if any(letter in python for letter in "'\\!\n"):
        raise SchedulerError(f"{python}: login.python: name a path without quotes, ! and backslashes", transient=False)
    # Letters, digits, - and _ only, which no shell expands: csh expands ! even between quotes.
    payload = base64.urlsafe_b64encode(zlib.compress(program("llmctl.transport.ssh.session_program", list(argv), cwd)))
    start = "import sys,zlib,base64;exec(zlib.decompress(base64.urlsafe_b64decode(sys.argv[1])))"
    return f"exec '{python}' -I -S -X utf8 -c '{start}' {payload.decode()}"
