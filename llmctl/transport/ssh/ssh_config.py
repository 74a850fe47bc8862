"""The user's ssh configuration as OpenSSH itself resolves it, with Include and Match: ``ssh -G`` (ssh(1))."""

import getpass
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from llmctl.errors import SchedulerError

_TIMEOUT_S = 30.0
_MAX_HOPS = 8
_DEFAULT_AGENT = "SSH_AUTH_SOCK"


@dataclass(frozen=True)
class SshConfig:
    """Resolved configuration of one host. Paths are absolute, tokens are expanded.

    Attributes:
        name: the user's name for the host, for the ssh command and for messages.
        hostname: name or address to connect to.
        port: TCP port.
        user: user name on the host.
        identity_files: private keys to try, in order.
        certificate_files: certificates of these keys.
        identities_only: offer only these keys of the agent.
        identity_agent: socket of the agent; None: SSH_AUTH_SOCK; empty: no agent.
        proxy_jump: jump hosts, as for ``ssh -J``; empty for none.
        says_jump: True if ssh needs ``proxy_jump`` as an option, because its configuration does not have it.
        proxy_command: command whose standard input and output are the connection; empty for none.
        known_hosts: files of known host keys, the user's first.
        host_key_alias: name of the host in known_hosts; empty: ``hostname``.
        has_control_path: True if a ControlMaster could be running.
        connect_timeout_s: limit for connecting; None for our own default.
        methods: authentication methods, in order of preference.
        password_prompts: maximum number of password prompts.
    """

    name: str
    hostname: str
    port: int = 22
    user: str = ""
    identity_files: tuple[str, ...] = ()
    certificate_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    proxy_jump: str = ""
    says_jump: bool = False
    proxy_command: str = ""
    known_hosts: tuple[str, ...] = ()
    host_key_alias: str = ""
    has_control_path: bool = False
    connect_timeout_s: float | None = None
    methods: tuple[str, ...] = ("publickey", "keyboard-interactive", "password")
    password_prompts: int = 3


def resolve_chain(host: str, environment: Mapping[str, str], *, proxy_jump: str | None = None) -> list[SshConfig]:
    """Configurations of the jump hosts, in order, and last of the host itself.

    Args:
        host: name of the host for the ssh command.
        environment: of the ssh command.
        proxy_jump: jump hosts, if the user's configuration names none.

    Raises:
        SchedulerError: ssh is not installed, or refuses the configuration.
    """
    own = resolve(host, environment)
    if proxy_jump is not None and not own.proxy_jump and not own.proxy_command:
        own = replace(own, proxy_jump=proxy_jump, says_jump=True)
    chain = [own]
    while chain[0].proxy_jump:
        if len(chain) > _MAX_HOPS:
            raise SchedulerError(
                f"{host}: more than {_MAX_HOPS} jump hosts; does a ProxyJump lead in a circle?",
                transient=False,
            )
        *before, last = chain[0].proxy_jump.split(",")
        hop = resolve(last, environment)
        # ssh -J a,b: reach b through a, whatever b's own entry says. Host a is reached by its own entry.
        if before:
            hop = replace(hop, proxy_jump=",".join(before), says_jump=True, proxy_command="")
        chain.insert(0, hop)
    return chain


def resolve(host: str, environment: Mapping[str, str]) -> SshConfig:
    """Resolve one host with ``ssh -G``; accepts [user@]host[:port] and ssh://, as ProxyJump writes them.

    Raises:
        SchedulerError: ssh is not installed, or refuses the configuration.
    """
    argv = [ssh_program(environment), "-G", *_target_words(host)]
    try:
        done = subprocess.run(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            encoding="utf-8",
            errors="surrogateescape",
        )
    except subprocess.TimeoutExpired:
        raise SchedulerError(
            f"ssh -G {host}: no answer within {_TIMEOUT_S:.0f} s; does a Match exec of ~/.ssh/config hang?",
            transient=True,
            argv=argv,
        ) from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SchedulerError(f"ssh -G {host}: {said}", transient=False, argv=argv, exit_status=done.returncode)
    return parse(host, done.stdout, home=pwd.getpwuid(os.getuid()).pw_dir, local_user=_local_user())


def user_on(host: str | None, environment: Mapping[str, str]) -> str:
    """The user's name on a host, from ssh's configuration; on this machine if ``host`` is None. Opens no connection.

    Args:
        host: as the ssh command knows the host.
        environment: environment variables of this process.
    """
    if host:
        with suppress(SchedulerError):
            return resolve(host, environment).user
    return environment.get("LOGNAME") or getpass.getuser()


def ssh_program(environment: Mapping[str, str]) -> str:
    """Path of the ssh command.

    Raises:
        SchedulerError: ssh is not in PATH.
    """
    found = shutil.which("ssh", path=environment.get("PATH"))
    if found is None:
        raise SchedulerError("ssh is not in PATH; install OpenSSH's client", transient=False)
    return found


def parse(name: str, text: str, *, home: str, local_user: str) -> SshConfig:
    """Parse the output of ``ssh -G``.

    Args:
        name: the user's name for the host.
        text: the output: a key and its value per line, keys in lower case.
        home: the user's home directory, from the password database as in OpenSSH.
        local_user: the user's name on this machine.
    """
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.strip().partition(" ")
        values.setdefault(key.lower(), []).append(value)

    # ssh -G prints defaults too, and "none" for what the user switched off.
    def first(key: str, default: str = "") -> str:
        value = values.get(key, [default])[0]
        return "" if value == "none" else value

    hostname = first("hostname", name)
    tokens = {
        "%": "%",
        "d": home,
        "h": hostname,
        "k": first("hostkeyalias") or hostname,
        "n": _target_words(name)[-1],
        "p": first("port", "22"),
        "r": first("user", local_user),
        "u": local_user,
    }

    def path(value: str) -> str:
        return expand(re.sub(r"^~(?=/|$)", lambda _: home, value), tokens)

    listed = (*values.get("userknownhostsfile", []), *values.get("globalknownhostsfile", []))
    known_hosts = [file for value in listed for file in _paths(value)]
    agent = values.get("identityagent", [_DEFAULT_AGENT])[0]
    timeout = first("connecttimeout")
    preferred = first("preferredauthentications")
    return SshConfig(
        name=name,
        hostname=hostname,
        port=int(tokens["p"]),
        user=tokens["r"],
        identity_files=tuple(path(value) for value in values.get("identityfile", []) if value != "none"),
        certificate_files=tuple(path(value) for value in values.get("certificatefile", []) if value != "none"),
        identities_only=first("identitiesonly") == "yes",
        identity_agent=None if agent == _DEFAULT_AGENT else "" if agent == "none" else path(agent),
        proxy_jump=first("proxyjump"),
        proxy_command=expand(first("proxycommand"), tokens),
        known_hosts=tuple(path(file) for file in known_hosts if file != "none"),
        host_key_alias=first("hostkeyalias"),
        has_control_path=bool(first("controlpath")),
        connect_timeout_s=float(timeout) if timeout.isdecimal() and int(timeout) > 0 else None,
        methods=_methods(preferred, first),
        password_prompts=int(first("numberofpasswordprompts", "3")),
    )


def expand(text: str, tokens: Mapping[str, str]) -> str:
    """Replace ssh's %-tokens (ssh_config(5)); unknown tokens stay."""
    return re.sub(r"%(.)", lambda found: tokens.get(found[1], found[0]), text)


def _methods(preferred: str, first: Callable[..., str]) -> tuple[str, ...]:
    switches = {
        "publickey": first("pubkeyauthentication", "yes"),
        "keyboard-interactive": first("kbdinteractiveauthentication", "yes"),
        "password": first("passwordauthentication", "yes"),
    }
    order: Sequence[str] = preferred.split(",") if preferred else tuple(switches)
    return tuple(method for method in order if switches.get(method, "no") not in ("no", "false"))


def _paths(value: str) -> list[str]:
    # ssh -G prints paths without quotes. A word that begins neither with / nor ~ belongs to the path before it.
    found: list[str] = []
    for word in value.split(" "):
        if found and not word.startswith(("/", "~")) and word != "none":
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def _target_words(host: str) -> list[str]:
    """Words for ssh's command line: a user and a port in the name become options."""
    plain = host.removeprefix("ssh://")
    user, at, place = plain.rpartition("@")
    found = re.fullmatch(r"(\[[^\]]+\]|[^:]*)(?::(\d+))?", place)
    words = ["-l", user] if at else []
    if found is not None:
        place = found[1].strip("[]")
        words += ["-p", found[2]] if found[2] else []
    return [*words, "--", place]


def target_words(config: SshConfig) -> list[str]:
    """Words that name a host on ssh's command line, ``--`` and the name last."""
    return [*(["-J", config.proxy_jump] if config.says_jump else []), *_target_words(config.name)]


def _local_user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
