"""Route to a host: over the user's open connection, if there is one, otherwise over a connection of our own."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from llmctl.errors import SchedulerError
from llmctl.transport.ssh import master_connection
from llmctl.transport.ssh.connection import Connection
from llmctl.transport.ssh.failures import PromptRefused
from llmctl.transport.ssh.ssh_config import SshConfig, resolve_chain
from llmctl.transport.ssh.terminal import Terminal

if TYPE_CHECKING:
    from llmctl.transport.ssh.authentication import Credentials


class Route:
    """Route to a host. Resolves the user's ssh configuration once, and keeps the user's answers.

    Attributes:
        host: name of the host for the ssh command.
    """

    def __init__(
        self,
        host: str,
        environment: Mapping[str, str],
        *,
        proxy_jump: str | None = None,
        terminal: Terminal | None = None,
    ) -> None:
        """Store the host's name; ``open`` resolves and connects.

        Args:
            host: name of the host for the ssh command.
            environment: of the ssh client: HOME, PATH, SSH_AUTH_SOCK.
            proxy_jump: jump host, if the user's configuration names none.
            terminal: asks for passwords.
        """
        self.host = host
        self._environment = environment
        self._proxy_jump = proxy_jump
        self._terminal = terminal or Terminal()
        self._chain: list[SshConfig] = []
        self._credentials: Credentials | None = None

    def open(self) -> Connection:
        """Connect. Only the first connection may ask the user for anything.

        Raises:
            SchedulerError: the connection failed; the message gives the reason.
        """
        if not self._chain:
            self._chain = resolve_chain(self.host, self._environment, proxy_jump=self._proxy_jump)
        if master_connection.is_running(self._chain[-1], self._environment):
            return master_connection.MasterConnection(self._chain[-1], self._environment)
        return self._open_own(self._chain)

    def give_up_asking(self) -> None:
        """Restore the terminal, even if a thread still waits for an answer."""
        self._terminal.restore()

    def may_try_again(self, error: SchedulerError) -> bool:
        """True if a transient failure is worth an immediate retry; False if the user would have to be asked."""
        return not isinstance(error, PromptRefused)

    def _open_own(self, chain: Sequence[SshConfig]) -> Connection:
        from llmctl.transport.ssh import paramiko_connection
        from llmctl.transport.ssh.authentication import Credentials

        if self._credentials is None:
            self._credentials = Credentials(self._environment, self._terminal)
        for number in range(len(chain) - 2, -1, -1):
            hop = chain[number]
            if master_connection.is_running(hop, self._environment):
                through = partial(master_connection.forward, hop, self._environment)
                connection = paramiko_connection.connect(
                    chain[number + 1 :], self._credentials, self._environment, through
                )
                break
        else:
            connection = paramiko_connection.connect(chain, self._credentials, self._environment)
        self._credentials.may_ask = False
        return connection
