"""The way to a host: a connection that the user has open already, if there is one, or one of our own."""

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
    """The way to a host. The user's configuration is asked once; what a person was asked for is kept.

    Attributes:
        host: as the ssh command knows it.
    """

    def __init__(
        self,
        host: str,
        environment: Mapping[str, str],
        *,
        proxy_jump: str | None = None,
        terminal: Terminal | None = None,
    ) -> None:
        """Take the host's name; nothing is asked yet.

        Args:
            host: as the ssh command knows it.
            environment: of the ssh client: HOME, PATH, SSH_AUTH_SOCK.
            proxy_jump: host to go through, where the user's configuration does not say.
            terminal: where passwords are asked.
        """
        self.host = host
        self._environment = environment
        self._proxy_jump = proxy_jump
        self._terminal = terminal or Terminal()
        self._chain: list[SshConfig] = []
        self._credentials: Credentials | None = None

    def open(self) -> Connection:
        """Connect. Only the first connection may ask a person for anything.

        Raises:
            SchedulerError: in one sentence, what is in the way.
        """
        if not self._chain:
            self._chain = resolve_chain(self.host, self._environment, proxy_jump=self._proxy_jump)
        if master_connection.is_running(self._chain[-1], self._environment):
            return master_connection.MasterConnection(self._chain[-1], self._environment)
        return self._open_own(self._chain)

    def give_up_asking(self) -> None:
        """Leave the terminal as it was, whoever still waits for an answer."""
        self._terminal.restore()

    def may_try_again(self, error: SchedulerError) -> bool:
        """Whether a transient failure is worth another attempt at once: not where a person would have to be asked."""
        return not isinstance(error, PromptRefused)

    def _open_own(self, chain: Sequence[SshConfig]) -> Connection:
        from llmctl.transport.ssh import paramiko_connection
        from llmctl.transport.ssh.authentication import Credentials

        if self._credentials is None:
            self._credentials = Credentials(self._environment, self._terminal)
        for number in range(len(chain) - 2, -1, -1):
            hop = chain[number]
            if master_connection.is_running(hop, self._environment):
                way = partial(master_connection.forward, hop, self._environment)
                connection = paramiko_connection.connect(chain[number + 1 :], self._credentials, self._environment, way)
                break
        else:
            connection = paramiko_connection.connect(chain, self._credentials, self._environment)
        self._credentials.may_ask = False
        return connection
