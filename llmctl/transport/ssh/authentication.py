"""Authentication: keys of the agent, key files, one-time codes and passwords, in the user's order.

The user is asked only when the connection is first made, never again while a command works.
"""

import base64
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import AgentSSH

from llmctl.errors import SchedulerError
from llmctl.transport.ssh.failures import BROKEN, PromptRefused
from llmctl.transport.ssh.ssh_config import SshConfig
from llmctl.transport.ssh.terminal import Terminal

AUTH_TIMEOUT_S = 60.0
_PERSON_TIMEOUT_S = 300.0
"""The user may have to fetch a phone; sshd itself waits two minutes (LoginGraceTime)."""
_Questions = tuple[str, str, list[tuple[str, bool]]]
_INTERACTIVE = ("keyboard-interactive", "password")


class _UserAgent(AgentSSH):
    """The user's ssh-agent on a given socket, not the socket of the process's environment."""

    def __init__(self, path: str) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10.0)
        connection.connect(path)
        self._connect(connection)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


@dataclass
class Credentials:
    """The user's answers and keys, kept for the length of one call of llmctl.

    Attributes:
        environment: of the ssh client: SSH_AUTH_SOCK.
        terminal: asks the user.
        may_ask: True as long as the user may be asked.
        keys: key files that have been read, by path; None for an unusable key.
    """

    environment: Mapping[str, str]
    terminal: Terminal
    may_ask: bool = True
    keys: dict[str, paramiko.PKey | None] = field(default_factory=dict)


class Login:
    """Authentication of one connection."""

    def __init__(self, transport: paramiko.Transport, config: SshConfig, credentials: Credentials) -> None:
        self._transport = transport
        self._config = config
        self._credentials = credentials
        self._tried: list[str] = []
        self._done: set[str] = set()

    def run(self) -> None:
        """Authenticate.

        Raises:
            SchedulerError: the host accepts none of our keys and answers, or the user would have to be asked.
        """
        transport, config = self._transport, self._config
        transport.auth_timeout = AUTH_TIMEOUT_S
        try:
            allowed = self._allowed()
            while not transport.is_authenticated():
                method = next((name for name in config.methods if name in allowed - self._done), None)
                if method is None:
                    raise self._refused(allowed)
                self._done.add(method)
                further = self._try(method)
                if further is not None:
                    # Accepted, but the host requires another method as well: a key, and then a one-time code.
                    allowed, self._done = further, {method} if method == "publickey" else set()
        except BROKEN + (paramiko.SSHException,) as error:
            if isinstance(error, paramiko.AuthenticationException) and transport.is_active():
                raise self._refused(set()) from None
            said = str(error) or "connection closed"
            raise SchedulerError(
                f"{config.name}: the host ended the authentication of {config.user}: {said}; "
                f"tried {', '.join(self._tried) or 'nothing'}",
                transient=not self._tried or not isinstance(error, paramiko.SSHException),
            ) from None

    def _allowed(self) -> set[str]:
        # A request for "none" makes the host list its methods (RFC 4252, 5.2). Some hosts accept "none" itself.
        try:
            return set(self._transport.auth_none(self._config.user))
        except paramiko.BadAuthenticationType as error:
            return set(error.allowed_types)

    def _try(self, method: str) -> set[str] | None:
        """Try one method; the further methods that the host requires after success, None after a refusal."""
        if method == "publickey":
            for label, key in self._keys():
                self._tried.append(label)
                with suppress(paramiko.AuthenticationException):
                    return set(self._transport.auth_publickey(self._config.user, key))
            return None
        if not self._credentials.may_ask:
            raise PromptRefused(
                f"{self._config.name}: the host asks for a password or code again; llmctl asks only when it starts, "
                "so run the command again",
                transient=True,
            )
        if not self._credentials.terminal.is_there:
            return None
        ask = self._ask_password if method == "password" else self._ask_questions
        for _ in range(self._config.password_prompts):
            self._tried.append(method)
            with suppress(paramiko.AuthenticationException):
                return set(ask())
        return None

    def _ask_password(self) -> list[str]:
        config = self._config
        password = self._credentials.terminal.ask(f"{config.user}@{config.hostname}'s password: ")
        return self._transport.auth_password(config.user, password, fallback=False)

    def _ask_questions(self) -> list[str]:
        # paramiko asks in a thread of its own. The user is asked in this thread, which Ctrl-C interrupts.
        asked: queue.SimpleQueue[_Questions | None] = queue.SimpleQueue()
        answers: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        outcome: list[Any] = []

        def hand_over(title: str, instructions: str, prompts: list[tuple[str, bool]]) -> list[str]:
            asked.put((title, instructions, prompts))
            return answers.get()

        def authenticate() -> None:
            try:
                outcome.append(self._transport.auth_interactive(self._config.user, hand_over))
            except Exception as error:
                outcome.append(error)
            asked.put(None)

        self._transport.auth_timeout = _PERSON_TIMEOUT_S
        threading.Thread(target=authenticate, daemon=True).start()
        while (questions := asked.get()) is not None:
            answers.put(self._answer(*questions))
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        further: list[str] = outcome[0]
        return further

    def _answer(self, title: str, instructions: str, prompts: list[tuple[str, bool]]) -> list[str]:
        intro = "".join(f"{text.strip()}\n" for text in (title, instructions) if text.strip())
        answers = []
        for question, shows in prompts:
            shown = f"{intro}({self._config.user}@{self._config.hostname}) {question}"
            answers.append(self._credentials.terminal.ask(shown, shows_answer=shows))
            intro = ""
        return answers

    def _keys(self) -> Iterator[tuple[str, paramiko.PKey]]:
        """Keys in OpenSSH's order: the agent's keys that the configuration names, its other keys, then key files."""
        files = [path for path in self._config.identity_files if Path(path).is_file()]
        public = {blob for path in self._config.identity_files if (blob := _public_part(path)) is not None}
        held = self._agent_keys()
        named = [key for key in held if key.asbytes() in public]
        others = [] if self._config.identities_only else [key for key in held if key.asbytes() not in public]
        for key in [*named, *others]:
            yield f"key {key.comment or key.get_name()} of the agent", key
        in_agent = {key.asbytes() for key in held}
        encrypted = []
        for path in files:
            if _public_part(path) in in_agent and _public_part(path) is not None:
                continue
            loaded = self._load(path)
            if loaded is not None:
                yield f"key {path}", loaded
            elif path not in self._credentials.keys:
                encrypted.append(path)
        # Last, so that the user is not asked for the passphrase of a key that is not needed.
        for path in encrypted:
            asked = self._load_encrypted(path)
            if asked is not None:
                yield f"key {path}", asked

    def _agent_keys(self) -> list[paramiko.AgentKey]:
        path = self._config.identity_agent
        if path is None:
            path = self._credentials.environment.get("SSH_AUTH_SOCK", "")
        elif path.startswith("$"):
            path = self._credentials.environment.get(path[1:].strip("{}"), "")
        if not path:
            return []
        try:
            return list(_UserAgent(path).get_keys())
        except (OSError, paramiko.SSHException) as error:
            self._tried.append(f"the agent at {path} ({error})")
            return []

    def _load(self, path: str) -> paramiko.PKey | None:
        """Key from a file; None if the passphrase is not known yet, or the file is unusable."""
        if path not in self._credentials.keys:
            try:
                self._credentials.keys[path] = _read_key(path, None, self._config)
            except paramiko.PasswordRequiredException:
                return None
            except (OSError, paramiko.SSHException, ValueError) as error:
                self._credentials.keys[path] = None
                self._tried.append(f"key {path} (cannot be read: {error})")
        return self._credentials.keys[path]

    def _load_encrypted(self, path: str) -> paramiko.PKey | None:
        if not self._credentials.may_ask or not self._credentials.terminal.is_there:
            self._tried.append(
                f"key {path} (encrypted, and no terminal to ask on: add the key to the agent with ssh-add)"
            )
            return None
        phrase = self._credentials.terminal.ask(f"Enter passphrase for key '{path}': ")
        try:
            self._credentials.keys[path] = _read_key(path, phrase, self._config)
        except (OSError, paramiko.SSHException, ValueError):
            self._credentials.keys[path] = None
            self._tried.append(f"key {path} (wrong passphrase)")
        return self._credentials.keys[path]

    def _refused(self, allowed: set[str]) -> SchedulerError:
        config = self._config
        wanted = ", ".join(sorted(allowed)) or "something else"
        tried = ", ".join(self._tried) or "nothing: no key found"
        asks = bool(allowed & set(_INTERACTIVE)) and not self._credentials.terminal.is_there
        hint = (
            "the host asks for a password or code and there is no terminal: log in beforehand, with "
            f"`ssh -fNM {config.name}` and a ControlPath in ~/.ssh/config"
            if asks
            else f"check that `ssh {config.name}` works"
        )
        return SchedulerError(
            f"{config.name}: the host refused user {config.user}; it accepts {wanted}; tried {tried}\n{hint}",
            transient=False,
        )


def _public_part(path: str) -> bytes | None:
    """Public key next to a private key file."""
    try:
        words = Path(path if path.endswith(".pub") else f"{path}.pub").read_text(encoding="ascii").split()
        return base64.b64decode(words[1], validate=True)
    except (OSError, ValueError, IndexError):
        return None


def _read_key(path: str, phrase: str | None, config: SshConfig) -> paramiko.PKey:
    """Private key with its certificate.

    Raises:
        paramiko.PasswordRequiredException: the file is encrypted.
        paramiko.SSHException, OSError, ValueError: the file cannot be read, or the passphrase is wrong.
    """
    problem: Exception = paramiko.SSHException("unknown key type")
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            key = kind.from_private_key_file(path, phrase)
        except paramiko.PasswordRequiredException:
            raise
        except (paramiko.SSHException, ValueError) as error:
            problem = error
            continue
        for file in (f"{path}-cert.pub", *config.certificate_files):
            if Path(file).is_file():
                with suppress(OSError, ValueError, paramiko.SSHException):
                    key.load_certificate(file)
                    break
        return key
    raise problem
