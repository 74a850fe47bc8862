"""Transport on machines that are reached by ssh: one connection each, made when it is first used."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile
    from llmctl.transport.protocol import Transport
    from llmctl.transport.ssh.terminal import Terminal
    from llmctl.transport.ssh.transport import RemoteTransport


def connect(
    host: str,
    environment: Mapping[str, str],
    *,
    proxy_jump: str | None = None,
    python: str | None = None,
    terminal: "Terminal | None" = None,
    patience_s: tuple[float, float] | None = None,
) -> "RemoteTransport":
    """Transport on a host. Nothing is connected yet: the first call does it, and says what is in the way.

    Args:
        host: as the ssh command knows it.
        environment: of the ssh client: HOME, PATH, SSH_AUTH_SOCK.
        proxy_jump: host to go through, where the user's ssh configuration does not say.
        python: Python 3.7 or later on the host. Unset: the first that is found there.
        terminal: where passwords are asked; shared by hosts that are connected to at the same time.
        patience_s: how long the first connection, and a lost one, is tried again. Unset: see RemoteTransport.
    """
    from llmctl.transport.ssh.route import Route
    from llmctl.transport.ssh.transport import FIRST_PATIENCE_S, RECONNECT_PATIENCE_S, RemoteTransport

    route = Route(host, environment, proxy_jump=proxy_jump, terminal=terminal)
    first, again = patience_s or (FIRST_PATIENCE_S, RECONNECT_PATIENCE_S)
    return RemoteTransport(route, python=python, first_patience_s=first, reconnect_patience_s=again)


def connect_hosts(profile: "ClusterProfile", environment: Mapping[str, str]) -> "Transport":
    """Transport of all hosts that a profile lists, shown as one.

    Raises:
        ProfileError: the profile names no machine.
    """
    from llmctl.transport.host_group import HostGroup
    from llmctl.transport.ssh.terminal import Terminal

    login, terminal = profile.login, Terminal()
    return HostGroup(
        {
            host: connect(
                host,
                environment,
                proxy_jump=login.proxy_jump,
                python=login.python,
                terminal=terminal,
                # One of several: who else is there answers meanwhile, and what this one does is not known.
                patience_s=(3.0, 10.0),
            )
            for host in profile.hosts
        },
        shared=profile.shared,
        runs_root=profile.runs_root,
    )
