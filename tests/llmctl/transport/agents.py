"""An agent on this machine, behind a pipe instead of an ssh connection."""

import os
import sys
from pathlib import Path

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.connection import ProcessChannel
from llmctl.transport.ssh.transport import RemoteTransport


class PipeConnection:
    """Runs the command lines for a login node in a shell on this machine."""

    def __init__(self, shell, environment):
        self.shell, self.environment = shell, environment
        self.channels = []

    is_open = True

    def start(self, command):
        self.channels.append(ProcessChannel([*self.shell, command], self.environment, "login"))
        return self.channels[-1]

    def send_file(self, *_):
        raise SchedulerError("login: has no SFTP server", transient=False)

    def run_interactive(self, command):
        return os.waitstatus_to_exitcode(os.system(command))

    def close(self):
        for channel in self.channels:
            channel.close()


class PipeRoute:
    """Route to an agent on this machine; raises each of ``failures`` once before it connects."""

    host = "login"

    def __init__(self, *shell, failures=(), **environment):
        self.shell = shell or ("sh", "-c")
        python = Path(sys.executable).parent
        self.environment = {
            **os.environ, "SHELL": "/bin/sh", "PATH": f"{python}:{os.environ['PATH']}", **environment
        }  # fmt: skip
        self.failures = list(failures)
        self.opened = []

    def open(self):
        if self.failures:
            raise self.failures.pop(0)
        self.opened.append(PipeConnection(self.shell, self.environment))
        return self.opened[-1]

    def give_up_asking(self):
        """Do nothing: the user was not asked."""

    def may_try_again(self, error):
        return error.transient


def agent(route, **options):
    """Transport through an agent, with its warnings collected in ``warnings``."""
    warnings = []
    transport = RemoteTransport(route, warning=warnings.append, **options)
    transport.warnings = warnings
    return transport
