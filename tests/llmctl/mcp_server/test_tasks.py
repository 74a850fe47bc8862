"""Tasks of an agent, by the SDK's client over real pipes and by the commands alone, on real runs of cluster local."""

import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client

import llmctl
from llmctl.cli.main import main
from tests.llmctl.api.test_submit import TINY
from tests.llmctl.mcp_server.agent_tasks import Ask, check_beforehand, read_about_runs, submit_and_end
from tests.llmctl.mcp_server.command_client import CommandClient
from tests.llmctl.mcp_server.served import HELLO, ROOT, words_of
from tests.waiting import HANG_S

READING = ["runs", "status", "wait", "logs", "metrics", "plan", "dry_run", "explain", "schema", "clusters"]
WRITING = ["submit", "resume", "cancel"]


def served(home: Path, tasks: Callable[[Client, Ask], Awaitable[None]], *words: str) -> None:
    """Do tasks with a server; ``ask`` returns the document of a tool, or of its error."""

    async def connected() -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "llmctl", "mcp", *words], env=environment, cwd=home
        )
        with (home / "said").open("w") as said, anyio.fail_after(HANG_S):
            async with Client(stdio_client(server, errlog=said)) as client:

                async def ask(tool: str, **arguments: Any) -> Any:
                    result = await client.call_tool(tool, arguments)
                    assert result.is_error == ("error" in result.structured_content)
                    return result.structured_content

                await tasks(client, ask)

    anyio.run(connected)


def test_an_agent_finds_checks_and_compares(home):
    trained = [llmctl.submit(example=True, name=name, set=TINY).wait() for name in ("first", "second")]
    (home / "fail.py").write_text("print('before the end')\nraise ValueError('no such shard')\n")
    failed = llmctl.submit(command=["fail.py"], torchrun=True, gpus_per_node=1, name="bad")
    assert failed.wait(check=False).state is llmctl.JobState.FAILED

    async def tasks(ask: Ask) -> None:
        await read_about_runs(ask, trained)
        await check_beforehand(ask, home)

    async def served_tasks(_: Client, ask: Ask) -> None:
        await tasks(ask)
        assert len(json.dumps(await ask("schema", name="config", section="optimizer"))) < 10_000

    served(home, served_tasks)
    anyio.run(tasks, CommandClient(home).ask)
    assert len([path for path in (home / "runs").iterdir() if not path.name.startswith(".")]) == 3


def test_an_agent_submits_waits_resumes_and_cancels(home):
    async def tasks(client: Client, ask: Ask) -> None:
        listed = {tool.name: tool.annotations for tool in (await client.list_tools()).tools}
        assert [*listed] == [*READING, *WRITING]
        assert [name for name, notes in listed.items() if not notes.read_only_hint] == WRITING
        assert [name for name, notes in listed.items() if notes.destructive_hint] == ["cancel"]
        await submit_and_end(ask)

    served(home, tasks, "--allow-submit")


def test_the_commands_submit_wait_resume_and_cancel(home):
    anyio.run(submit_and_end, CommandClient(home).ask)


def test_hostile_calls_are_answered_with_a_sentence(home):
    (home / "noise").write_bytes(bytes(range(1, 256)))

    async def tasks(client: Client, ask: Ask) -> None:
        assert [tool.name for tool in (await client.list_tools()).tools] == READING
        for name in (*WRITING, "rm"):
            with pytest.raises(MCPError, match=f"there is no tool '{name}'"):
                await client.call_tool(name, {})
        for tool, arguments, code in (
            ("logs", {"run": "nobody"}, 5),
            ("logs", {"run": "nobody", "lines": 10**12}, 2),
            ("logs", {}, 2),
            ("runs", {"most": 10**30}, 2),
            ("runs", {"state": "odd"}, 2),
            ("status", {"runs": ["\x1b[31mred"]}, 5),
            ("status", {"runs": ["a\0b"]}, 2),
            ("plan", {"config": "noise", "device": "H100"}, 3),
            ("plan", {"config": "a\0b"}, 2),
            ("plan", {"config": "x" * 5000, "device": "H100"}, 2),
            ("dry_run", {"example": True, "node": 8}, 2),
            ("explain", {"words": ["nonsense"]}, 2),
            ("schema", {"name": "nonsense"}, 2),
            ("schema", {"name": "config", "section": "nonsense"}, 2),
            ("schema", {"name": "list", "section": "runs"}, 2),
        ):
            answer = await ask(tool, **arguments)
            assert answer["exit_code"] == code and answer["error"].isprintable(), (tool, arguments, answer)

    served(home, tasks)
    assert "Traceback" not in (home / "said").read_text()


def test_standard_output_has_only_the_protocol_and_the_end_of_input_ends_it(home):
    asked = [
        {"method": "initialize", "id": 1, "params": HELLO},
        {"method": "notifications/initialized"},
        {"method": "tools/call", "id": 2, "params": {"name": "dry_run", "arguments": {"example": True}}},
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        words_of(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=home, env=environment
    )
    with process:
        for each in asked:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **each}).encode() + b"\n")
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in range(2)]
        rest, said = process.communicate(timeout=HANG_S)
    assert [answer["id"] for answer in answers] == [1, 2] and rest == b"" and process.returncode == 0
    assert b"bundled example" in said


def test_a_line_that_is_not_a_message_is_answered_and_the_server_goes_on(home):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ping = b'{"jsonrpc": "2.0", "id": 5, "method": "ping"}'
    with subprocess.Popen(
        words_of(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=home, env=environment
    ) as process:
        hello = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO}).encode()

        def answer_to(line: bytes) -> tuple[object, object]:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            found = json.loads(process.stdout.readline())
            return found["id"], found.get("error", {}).get("code")

        assert answer_to(b'{"jsonrpc": "2.0", "id": 1, "meth') == (None, -32700)
        assert answer_to(b"\n" + hello) == (1, None)
        assert answer_to(b"\xff\x00\x1b[31m") == (None, -32700)
        assert answer_to(b'{"jsonrpc": "2.0", "id": 3, "method": 4}') == (3, -32600)
        assert answer_to(b'{"jsonrpc": "1.0", "id": true, "method": "ping"}') == (None, -32600)
        assert answer_to(b"[1]") == (None, -32600)
        assert answer_to(b"[" * 100_000) == (None, -32700)
        assert answer_to(ping) == (5, None)
        rest, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, rest) == (0, b"") and len(said.splitlines()) == 6
    assert b"mcp: a line of standard input is not JSON: recursion limit exceeded" in said


@pytest.mark.usefixtures("home")
def test_without_the_package_one_sentence_says_the_cure(capsys, monkeypatch):
    monkeypatch.setattr("llmctl.cli.mcp.find_spec", lambda _: None)
    assert main(["mcp"]) == 2
    assert "install it: pip install 'llmctl-pretrain[mcp]'" in capsys.readouterr().err
