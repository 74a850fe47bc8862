"""Site messages: shown once to each user of a cluster."""

from llmctl.paths import UserFolders
from llmctl.site.profile import ClusterProfile
from llmctl.transport.file_writes import FileWrite, write_files


def unseen_site_message(profile: ClusterProfile, folders: UserFolders) -> str:
    """The profile's site message if this user has not seen it; a changed message is new."""
    if not profile.notice:
        return ""
    path = folders.state / "notices" / profile.name
    try:
        told = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        told = ""
    return "" if told == _digest(profile.notice) else " ".join(profile.notice.split())


def remember_site_message(profile: ClusterProfile, folders: UserFolders) -> None:
    """Record that this user has seen the site message.

    Raises:
        OSError: the record cannot be written.
    """
    if not profile.notice:
        return
    write_files([FileWrite(str(folders.state / "notices" / profile.name), _digest(profile.notice).encode())])


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()
