"""Parsed output of ``ssh -G`` of OpenSSH 9.2p1, and chains of hops resolved by the real ssh."""

import os
import shutil
from pathlib import Path

import pytest

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.ssh_config import parse, resolve_chain, target_words

RECORDED = Path(__file__).parents[2] / "recorded" / "ssh"


def read(name, file):
    text = (RECORDED / file).read_text()
    return parse(name, text, home="/home/me", local_user="me")


def test_a_configuration_of_defaults_and_a_jump():
    config = read("example.com", "jump_9.2p1.txt")
    assert (config.hostname, config.port, config.user) == ("example.com", 22, "root")
    assert config.proxy_jump == "a@b:2222,c"
    assert config.identity_files[:2] == ("/home/me/.ssh/id_rsa", "/home/me/.ssh/id_ecdsa")
    assert config.known_hosts == (
        "/home/me/.ssh/known_hosts",
        "/home/me/.ssh/known_hosts2",
        "/etc/ssh/ssh_known_hosts",
        "/etc/ssh/ssh_known_hosts2",
    )
    assert (config.identity_agent, config.identities_only, config.has_control_path) == (None, False, False)
    assert (config.connect_timeout_s, config.password_prompts) == (None, 3)
    assert config.methods == ("publickey", "keyboard-interactive", "password")


def test_every_supported_option():
    config = read("x", "everything_9.2p1.txt")
    assert config.identity_files == ("/home/me/.ssh/id_root",)
    assert config.certificate_files == ("/home/me/.ssh/id_x-cert.pub",)
    assert config.proxy_command == "nc x 22"
    assert config.known_hosts[:3] == ("/home/me/.ssh/kh", "/home/me/.ssh/kh2", "/tmp/a b")
    assert (config.identity_agent, config.host_key_alias, config.has_control_path) == ("", "foo", True)
    assert config.connect_timeout_s == 7


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("preferredauthentications password,gssapi-with-mic,publickey\n", "methods", ("password", "publickey")),
        ("kbdinteractiveauthentication no\n", "methods", ("publickey", "password")),
        ("pubkeyauthentication false\n", "methods", ("keyboard-interactive", "password")),
        ("identityagent /run/%u/agent\n", "identity_agent", "/run/me/agent"),
        ("proxycommand none\nproxyjump none\n", "proxy_command", ""),
        ("hostname h\nport 2022\nuser u\nproxycommand a %h:%p %r %% %n %q\n", "proxy_command", "a h:2022 u % x %q"),
        ("identitiesonly yes\n", "identities_only", True),
    ],
)
def test_single_lines(lines, key, value):
    assert getattr(parse("x", lines, home="/home/me", local_user="me"), key) == value


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("host", ["--", "host"]),
        ("me@host", ["-l", "me", "--", "host"]),
        ("me@corp@host:2022", ["-l", "me@corp", "-p", "2022", "--", "host"]),
        ("ssh://host:22", ["-p", "22", "--", "host"]),
        ("[fe80::1%eth0]:22", ["-p", "22", "--", "fe80::1%eth0"]),
        ("fe80::1", ["--", "fe80::1"]),
    ],
)
def test_host_names_as_the_ssh_command_accepts_them(name, words):
    assert target_words(parse(name, "", home="/", local_user="me")) == words


@pytest.fixture
def environment(tmp_path):
    """An ssh command that reads the test's own configuration."""
    real = shutil.which("ssh")
    (tmp_path / "config").write_text(
        "Host inner\n HostName 10.0.0.5\n ProxyJump gate\n"
        "Host gate\n HostName gate.example\n Port 2022\n User visitor\n"
        "Host loop\n ProxyJump loop2\nHost loop2\n ProxyJump loop\n"
        "Host two\n ProxyJump first,inner\nHost piped\n ProxyCommand nc %h %p\n"
        'Match exec "test $ANSWER = 42"\n User asked\n'
    )
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {real} -F {tmp_path}/config "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ANSWER": "41"}


def hops(chain):
    return [(hop.user if hop.user == "visitor" else "", hop.hostname, hop.port) for hop in chain]


@pytest.mark.programs("ssh")
def test_a_host_behind_a_gate(environment):
    assert hops(resolve_chain("inner", environment)) == [("visitor", "gate.example", 2022), ("", "10.0.0.5", 22)]


@pytest.mark.programs("ssh")
def test_a_list_of_hops_ignores_the_proxy_jump_of_each_hop(environment):
    chain = resolve_chain("two", environment)
    assert [hop.hostname for hop in chain] == ["first", "10.0.0.5", "two"]
    assert (chain[1].proxy_jump, target_words(chain[1])) == ("first", ["-J", "first", "--", "inner"])
    assert target_words(chain[2]) == ["--", "two"]


@pytest.mark.programs("ssh")
def test_the_jump_host_of_the_profile_counts_if_the_user_names_none(environment):
    assert [hop.hostname for hop in resolve_chain("plain", environment, proxy_jump="inner")] == [
        "gate.example",
        "10.0.0.5",
        "plain",
    ]
    assert [hop.hostname for hop in resolve_chain("inner", environment, proxy_jump="x")] == ["gate.example", "10.0.0.5"]
    assert len(resolve_chain("piped", environment, proxy_jump="x")) == 1


@pytest.mark.programs("ssh")
def test_match_exec_sees_the_users_environment(environment):
    assert resolve_chain("plain", {**environment, "ANSWER": "42"})[0].user == "asked"


@pytest.mark.programs("ssh")
def test_errors_of_a_configuration_are_reported(environment, tmp_path):
    with pytest.raises(SchedulerError, match="does a ProxyJump lead in a circle"):
        resolve_chain("loop", environment)
    (tmp_path / "config").write_text("Nonsense yes\n")
    with pytest.raises(SchedulerError, match="ssh -G plain: .*terminating, 1 bad configuration options") as caught:
        resolve_chain("plain", environment)
    assert not caught.value.transient
    with pytest.raises(SchedulerError, match="ssh is not in PATH"):
        resolve_chain("plain", {"PATH": str(tmp_path / "none")})
