"""Tasks of an agent, by the SDK's own client over real pipes, on real runs of cluster local."""

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
from tests.llmctl.api.test_submit import CONFIG, TINY
from tests.llmctl.mcp_server.served import HELLO, ROOT, words_of
from tests.waiting import HANG_S

READING = ["runs", "status", "wait", "logs", "metrics", "plan", "dry_run", "explain", "schema", "clusters"]
WRITING = ["submit", "resume", "cancel"]
Ask = Callable[..., Awaitable[Any]]


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

    async def tasks(_: Client, ask: Ask) -> None:
        (found,) = (await ask("runs", state="failed", most=1))["runs"]
        assert found["name"] == "bad" and "exit code 1" in found["detail"] and found["exit_code"] == 1
        lines = (await ask("logs", run=found["run_id"], rank="failed"))["lines"]
        assert any("ValueError: no such shard" in line for line in lines)
        columns = (await ask("metrics", run="first", points=2))["columns"]
        assert columns["iteration"][-1] == 6 and len(columns["iteration"]) == 2
        assert columns["lm_loss"][-1] == pytest.approx(trained[0].loss)
        both = (await ask("status", runs=["first", "second"]))["runs"]
        assert [run["loss"] for run in both] == [view.loss for view in trained]
        clusters = {each["name"]: each["scheduler"] for each in (await ask("clusters"))["clusters"]}
        assert clusters["local"] == "local" and clusters["slurm"] == "slurm"
        assert (await ask("clusters", name="slurm"))["scheduler"] == "slurm"
        text = json.dumps(CONFIG)
        small = await ask("plan", config_text=text, device="H100", gpus_per_node=1, set={"model.vocab_size": 1000})
        assert small["fits"] and small["peak_memory_bytes"] > 0
        asked = {"config_text": text, "device": "V100-16GB", "gpus_per_node": 1}
        large_model = {"model.vocab_size": 1000, "model.num_layers": 200, "model.hidden_size": 1024}
        large = await ask("plan", **asked, set=large_model)
        assert not large["fits"] and "its largest item is" in large["why_not"]
        words = (await ask("explain", words=["optimizer.lr", "--swiglu"]))["explained"]
        assert "Learning rate" in words["optimizer.lr"] and "sets model.swiglu" in words["--swiglu"]
        optimizer = await ask("schema", name="config", section="optimizer")
        assert "lr" in optimizer["schema"]["properties"] and len(json.dumps(optimizer)) < 10_000
        wrong = await ask("dry_run", config_text="model: {num_layer: 2}")
        assert "num_layers" in wrong["error"] and wrong["exit_code"] == 3
        plan = await ask("dry_run", example=True, nodes=2)
        assert plan["run_dir"].startswith(str(home / "runs")) and plan["cost"] is None and "#!" in plan["script"]
        assert plan["messages"]

    served(home, tasks)
    assert len([path for path in (home / "runs").iterdir() if not path.name.startswith(".")]) == 3


_SECOND = "test $LLMCTL_ATTEMPT = 2 && test -z $PYDANTIC_DISABLE_PLUGINS"
"""Succeeds in the second attempt, without the variable that llmctl sets for itself alone."""


def test_an_agent_submits_waits_resumes_and_cancels(home):
    async def tasks(client: Client, ask: Ask) -> None:
        listed = {tool.name: tool.annotations for tool in (await client.list_tools()).tools}
        assert [*listed] == [*READING, *WRITING]
        assert [name for name, notes in listed.items() if not notes.read_only_hint] == WRITING
        assert [name for name, notes in listed.items() if notes.destructive_hint] == ["cancel"]
        run = (await ask("submit", command=["bash", "-c", _SECOND], name="twice"))["run_id"]
        ended = await ask("wait", run=run, timeout_s=300)
        assert (ended["state"], ended["has_ended"]) == ("failed", True)
        assert "runs its command again" in (await ask("resume", run=run))["messages"][0]
        assert (await ask("wait", run=run, timeout_s=300))["state"] == "completed"
        long = (await ask("submit", command=["sleep", "10000"], name="long"))["run_id"]
        assert (await ask("wait", run=long, timeout_s=0))["has_ended"] is False
        assert (await ask("cancel", run=long, grace_s=5))["run"]["state"] == "cancelled"

    served(home, tasks, "--allow-submit")


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
