"""Host keys, checked against the user's known_hosts files. llmctl never adds a key to these files.

Format: sshd(8), SSH_KNOWN_HOSTS FILE FORMAT.
"""

import base64
import binascii
import fnmatch
import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.ssh_config import SshConfig

# Key type -> signature algorithms that prove it (RFC 8332 for RSA).
_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")}


@dataclass(frozen=True)
class KnownKey:
    """One known_hosts line of the host.

    Attributes:
        file: path of the known_hosts file.
        line: line number in the file.
        marker: ``@revoked``, ``@cert-authority``, or empty.
        kind: type of the key.
        blob: the key.
    """

    file: str
    line: int
    marker: str
    kind: str
    blob: bytes


def known_keys(config: SshConfig) -> list[KnownKey]:
    """Every line for this host in the user's and the machine's known_hosts files."""
    name = config.host_key_alias or config.hostname.lower()
    names = [name] if config.port == 22 or config.host_key_alias else [f"[{name}]:{config.port}"]
    found = []
    for file in config.known_hosts:
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found += [key for key in parse_known_hosts(text, file, names)]
    return found


def parse_known_hosts(text: str, file: str, names: Sequence[str]) -> list[KnownKey]:
    """Lines of a known_hosts file that match one of the names; malformed lines are skipped."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or not any(_matches(words[0], name) for name in names):
            continue
        try:
            found.append(KnownKey(file, number, marker, words[1], base64.b64decode(words[2], validate=True)))
        except binascii.Error:
            continue
    return found


def preferred_algorithms(known: Sequence[KnownKey], offered: Sequence[str]) -> list[str]:
    """Offered algorithms, first those that can prove a known key, as OpenSSH orders them."""
    kinds = {key.kind for key in known if not key.marker}
    wanted = {algorithm for kind in kinds for algorithm in _ALGORITHMS.get(kind, (kind,))}
    return sorted(offered, key=lambda algorithm: algorithm not in wanted)


def check_host_key(config: SshConfig, known: Sequence[KnownKey], kind: str, blob: bytes) -> None:
    """Check the proved key of a host against its known keys.

    Args:
        config: of the host.
        known: see ``known_keys``.
        kind: type of the key that the host has proved.
        blob: that key.

    Raises:
        SchedulerError: the key is unknown, revoked or changed.
    """
    revoked = next((key for key in known if key.marker == "@revoked" and key.blob == blob), None)
    if revoked is not None:
        raise SchedulerError(
            f"{config.name}: its host key is marked as revoked in {revoked.file} line {revoked.line}; "
            "ask the site before you connect",
            transient=False,
        )
    # A key with a marker is not the host's own.
    plain = [key for key in known if not key.marker]
    if any(key.kind == kind and key.blob == blob for key in plain):
        return
    shown = f"{_short(kind)} {fingerprint(blob)}"
    # Also a key of another kind: whoever stands between could offer a kind that known_hosts does not have.
    if plain:
        before = next((key for key in plain if key.kind == kind), plain[0])
        raise SchedulerError(
            f"{config.name}: ITS HOST KEY HAS CHANGED: {before.file} line {before.line} holds "
            f"{_short(before.kind)} {fingerprint(before.blob)}, the host now shows {shown}; this may be an attack\n"
            "ask the site whether the key was replaced; if so, remove that line and run "
            f"`ssh {config.name}` once",
            transient=False,
        )
    by_authority = any(key.marker == "@cert-authority" for key in known)
    remedy = (
        "known_hosts trusts a certificate authority for the host, which llmctl cannot check: open a connection that "
        f"llmctl can use, with `ssh -fNM {config.name}` and a ControlPath"
        if by_authority
        else f"run `ssh {config.name}` once, and answer yes only if the fingerprint that it shows is the one that the "
        "site publishes; this adds the key to known_hosts, and llmctl then connects"
    )
    raise SchedulerError(f"{config.name}: its host key is unknown: {shown}\n{remedy}", transient=False)


def fingerprint(blob: bytes) -> str:
    """Fingerprint of a key, as OpenSSH shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _short(kind: str) -> str:
    found = re.search(r"ed25519|ecdsa|rsa|dss", kind)
    return found[0].upper() if found else kind


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        _, _, salt, digest = (patterns + "||").split("|")[:4]
        try:
            made = hmac.new(base64.b64decode(salt), name.encode(), "sha1").digest()
            return hmac.compare_digest(made, base64.b64decode(digest))
        except binascii.Error:
            return False
    matched = False
    for pattern in patterns.split(","):
        negated, plain = pattern.startswith("!"), pattern.removeprefix("!").lower()
        # [ and ] are not wildcards in known_hosts but part of [host]:port.
        if fnmatch.fnmatchcase(name.lower(), plain.replace("[", "[[]")):
            if negated:
                return False
            matched = True
    return matched
