"""Hands on machines that are reached by ssh: one connection each, made when it is first used."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmctl.hands import Hands
    from llmctl.profile import ClusterProfile
    from llmctl.remote.transport import RemoteTransport
    from llmctl.resources import UserFolders


def connect(
    host: str,
    environment: Mapping[str, str],
    folders: "UserFolders",
    *,
    proxy_jump: str | None = None,
    python: str | None = None,
) -> "RemoteTransport":
    """Hands on a host. Nothing is connected yet: the first call does it, and says what is in the way.

    Args:
        host: as the ssh command knows it.
        environment: of the ssh client: HOME, PATH, SSH_AUTH_SOCK.
        folders: the user's folders.
        proxy_jump: host to go through, where the user's ssh configuration does not say.
        python: Python 3.7 or later on the host. Unset: the first that is found there.
    """
    from llmctl.remote.transport import RemoteTransport

    return RemoteTransport(host, environment, folders, proxy_jump=proxy_jump, python=python)


def hands_of(profile: "ClusterProfile", environment: Mapping[str, str], folders: "UserFolders") -> "Hands":
    """Hands of a cluster whose machines are reached by ssh: its login node, or all of its hosts.

    Raises:
        ProfileError: the profile names no machine.
    """
    login = profile.login
    if profile.scheduler != "ssh" and login.host is not None:
        return connect(login.host, environment, folders, proxy_jump=login.proxy_jump, python=login.python)
    from llmctl.host_group import HostGroup

    return HostGroup(
        {
            host: connect(host, environment, folders, proxy_jump=login.proxy_jump, python=login.python)
            for host in profile.hosts
        },
        shared=profile.shared,
    )
