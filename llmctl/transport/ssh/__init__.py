"""Transport on machines that are reached by ssh: one connection each, made at its first use."""

from collections.abc import Callable, Mapping
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
    warning: Callable[[str], None] | None = None,
) -> "RemoteTransport":
    """Transport on a host. The first call connects, and raises the error if the connection fails.

    Args:
        host: name of the host for the ssh command.
        environment: of the ssh client: HOME, PATH, SSH_AUTH_SOCK.
        proxy_jump: jump host, if the user's ssh configuration names none.
        python: Python 3.7 or later on the host. Unset: the first found on the host.
        terminal: asks for passwords; shared by hosts that are connected to at the same time.
        patience_s: seconds of attempts for the first connection, and for a reconnection. Unset: see RemoteTransport.
        warning: called with each warning. Unset: prints a line on standard error.
    """
    from llmctl.transport.ssh.route import Route
    from llmctl.transport.ssh.transport import FIRST_TIMEOUT_S, RECONNECT_TIMEOUT_S, RemoteTransport

    route = Route(host, environment, proxy_jump=proxy_jump, terminal=terminal)
    first, again = patience_s or (FIRST_TIMEOUT_S, RECONNECT_TIMEOUT_S)
    return RemoteTransport(route, python=python, first_patience_s=first, reconnect_patience_s=again, warning=warning)


def connect_hosts(
    profile: "ClusterProfile",
    environment: Mapping[str, str],
    terminal: "Terminal",
    warning: Callable[[str], None] | None = None,
) -> "Transport":
    """Transport on all hosts of a profile, as one group; ``terminal`` asks for passwords, one at a time.

    Args:
        profile: of the cluster.
        environment: of the ssh client.
        terminal: shared by the hosts.
        warning: called with each warning. Unset: prints a line on standard error.

    Raises:
        ProfileError: the profile lists no host.
    """
    from llmctl.transport.host_group import HostGroup

    login = profile.login
    return HostGroup(
        {
            host: connect(
                host,
                environment,
                proxy_jump=login.proxy_jump,
                python=login.python,
                terminal=terminal,
                # Short: the other hosts of the group answer meanwhile, and the state of this host is unknown.
                patience_s=(3.0, 10.0),
                warning=warning,
            )
            for host in profile.hosts
        },
        shared=profile.shared,
        runs_root=profile.runs_root,
        warning=warning,
    )
