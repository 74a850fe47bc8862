"""Client of yaml-language-server, over its standard input and output (Language Server Protocol 3.17)."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_SETTINGS = {"yaml": {"schemaStore": {"enable": False}, "validate": True, "hover": True, "completion": True}}


class LanguageServer:
    """One server, with the documents that are open in it. Lines and columns count from 0."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._asked = 0
        self._problems: dict[str, list[tuple[int, str]]] = {}
        self._ask("initialize", processId=None, rootUri=None, capabilities={"textDocument": {"hover": {}}})
        self._tell("initialized")
        self._tell("workspace/didChangeConfiguration", settings=_SETTINGS)

    def open(self, uri: str, text: str) -> list[tuple[int, str]]:
        """Open a document under a new name; returns line and message of each problem."""
        self._tell("textDocument/didOpen", textDocument={"uri": uri, "languageId": "yaml", "version": 1, "text": text})
        while uri not in self._problems:
            self._take(self._read())
        return self._problems[uri]

    def completions(self, uri: str, line: int, column: int) -> list[str]:
        """The words that an editor would offer at a place."""
        found = self._ask("textDocument/completion", **_place(uri, line, column))
        return [item["label"] for item in found["items"]]

    def hover(self, uri: str, line: int, column: int) -> str:
        """The text that an editor would show over a place; empty without one."""
        found = self._ask("textDocument/hover", **_place(uri, line, column))
        return str(found["contents"]["value"]) if found else ""

    def end(self) -> None:
        """End the server."""
        self._ask("shutdown")
        self._tell("exit")

    def _ask(self, method: str, **params: Any) -> Any:
        self._asked += 1
        self._send({"id": self._asked, "method": method, "params": params})
        while True:
            message = self._read()
            if message.get("id") == self._asked and "method" not in message:
                assert "error" not in message, message["error"]
                return message["result"]
            self._take(message)

    def _tell(self, method: str, **params: Any) -> None:
        self._send({"method": method, "params": params})

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("method") == "textDocument/publishDiagnostics":
            found = message["params"]["diagnostics"]
            self._problems[message["params"]["uri"]] = [
                (one["range"]["start"]["line"], one["message"]) for one in found
            ]
        elif "id" in message and "method" in message:
            items = message["params"].get("items")
            # The server asks for settings, which it has, or to register, which changes nothing here.
            self._send({"id": message["id"], "result": None if items is None else [None] * len(items)})

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        length = 0
        while line := self._process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert length, "the server has ended"
        found: dict[str, Any] = json.loads(self._process.stdout.read(length))
        return found


def _place(uri: str, line: int, column: int) -> dict[str, Any]:
    return {"textDocument": {"uri": uri}, "position": {"line": line, "character": column}}


@contextmanager
def language_server(command: Sequence[str]) -> Iterator[LanguageServer]:
    """A server that ends with the block."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            server = LanguageServer(process)
            yield server
            server.end()
        finally:
            process.kill()
