"""known_hosts files: names hashed by ssh-keygen of OpenSSH 9.2p1, and every kind of line in sshd(8)."""

import base64
from pathlib import Path

import pytest

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.host_keys import (
    KnownKey,
    check_host_key,
    fingerprint,
    known_keys,
    parse_known_hosts,
    preferred_algorithms,
)
from llmctl.transport.ssh.ssh_config import SshConfig

HASHED = Path(__file__).parents[2] / "recorded" / "ssh" / "known_hosts_hashed"
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIEB7Oai4lNDQu9NhUecGdkAKafzD62jmv+5MnNAAwJXY"
BLOB = base64.b64decode(KEY)
OTHER = base64.b64decode(KEY.replace("Oai4", "Oai5"))


def lines_for(name, text):
    return [key.line for key in parse_known_hosts(text, "kh", [name])]


def test_the_fingerprint_is_that_of_ssh_keygen():
    assert fingerprint(BLOB) == "SHA256:TXiLzuywpKjbI4M7mrkjkHXpF2UFGEsGMtK+8IcnlrM"


@pytest.mark.parametrize(
    ("name", "lines"),
    [("login.example", [1]), ("10.0.0.1", [2]), ("[login.example]:2022", [3]), ("other.example", []), ("10.0.0.2", [])],
)
def test_hashed_names(name, lines):
    assert lines_for(name, HASHED.read_text()) == lines


@pytest.mark.parametrize(
    ("patterns", "name", "matches"),
    [
        ("login", "login", True),
        ("login", "login2", False),
        ("LOGIN", "login", True),
        ("*.example,!bad.example", "good.example", True),
        ("*.example,!bad.example", "bad.example", False),
        ("login?", "login1", True),
        ("[login]:2022", "[login]:2022", True),
        ("[login]:2022", "login", False),
        ("[*.example]:2022", "[a.example]:2022", True),
        ("|1|broken", "login", False),
        ("|1|%%%|%%%", "login", False),
    ],
)
def test_plain_names_and_patterns(patterns, name, matches):
    assert bool(lines_for(name, f"{patterns} ssh-ed25519 {KEY}\n")) is matches


def test_empty_and_invalid_lines_are_skipped():
    text = f"\n# login ssh-ed25519 {KEY}\nlogin\nlogin ssh-ed25519 not-base64\n  login ssh-ed25519 {KEY} note\n"
    assert lines_for("login", text) == [5]


def test_files_port_and_alias_of_the_lookup(tmp_path):
    (tmp_path / "a").write_text(f"login ssh-ed25519 {KEY}\n[login]:2022 ssh-ed25519 {KEY}\nalias ssh-ed25519 {KEY}\n")
    files = (str(tmp_path / "none"), str(tmp_path / "a"))
    assert [key.line for key in known_keys(SshConfig("x", "LOGIN", known_hosts=files))] == [1]
    assert [key.line for key in known_keys(SshConfig("x", "login", 2022, known_hosts=files))] == [2]
    alias = SshConfig("x", "login", 2022, known_hosts=files, host_key_alias="alias")
    assert [(key.line, key.file) for key in known_keys(alias)] == [(3, str(tmp_path / "a"))]


def known(blob=BLOB, marker="", kind="ssh-ed25519"):
    return [KnownKey("/kh", 7, marker, kind, blob)]


def test_only_a_known_key_is_accepted():
    config = SshConfig("login", "10.0.0.1")
    check_host_key(config, known(), "ssh-ed25519", BLOB)
    for keys, words in (
        (
            [],
            "login: its host key is unknown: ED25519 SHA256:TXiLzuywp.*\nrun `ssh login` once, and answer yes only if",
        ),
        (known(OTHER), "login: ITS HOST KEY HAS CHANGED: /kh line 7 holds ED25519 SHA256:.* may be an attack\nask the"),
        (known(OTHER, kind="ssh-rsa"), "/kh line 7 holds RSA SHA256:"),
        (known() + known(marker="@revoked"), "marked as revoked in /kh line 7"),
        (known(OTHER, "@cert-authority"), "trusts a certificate authority.*ssh -fNM login"),
    ):
        with pytest.raises(SchedulerError, match=words) as caught:
            check_host_key(config, keys, "ssh-ed25519", BLOB)
        assert not caught.value.transient
        assert "again" not in caught.value.message
        assert len(caught.value.message.splitlines()) == 2 or "revoked" in caught.value.message


def test_the_known_key_type_is_requested():
    offered = ["ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256", "ssh-rsa"]
    assert preferred_algorithms(known(kind="ssh-rsa"), offered) == [*offered[2:], *offered[:2]]
    assert preferred_algorithms(known(marker="@revoked"), offered) == offered
