"""What a site's profile wants to be told once to everyone who uses it."""

from llmctl.paths import UserFolders
from llmctl.site.profile import ClusterProfile
from llmctl.transport.file_writes import FileWrite, write_files


def unseen_site_message(profile: ClusterProfile, folders: UserFolders) -> str:
    """The profile's notice, unless this user has been told it; a changed one is new."""
    if not profile.notice:
        return ""
    path = folders.state / "notices" / profile.name
    try:
        told = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        told = ""
    return "" if told == _digest(profile.notice) else " ".join(profile.notice.split())


def remember_site_message(profile: ClusterProfile, folders: UserFolders) -> None:
    """Note that this user has been told it.

    Raises:
        OSError: it cannot be noted.
    """
    if not profile.notice:
        return
    write_files([FileWrite(str(folders.state / "notices" / profile.name), _digest(profile.notice).encode())])


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()
