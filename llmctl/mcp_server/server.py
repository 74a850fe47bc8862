"""The server: tools over standard input and output, by the Model Context Protocol."""

import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    ToolAnnotations,
)
from mcp_types import Tool as ListedTool

from llmctl import __version__
from llmctl.api.call import plain
from llmctl.errors import BUG, LlmctlError, UsageError, system_error
from llmctl.mcp_server import jobs, reading
from llmctl.mcp_server.connection import connected, is_disconnect
from llmctl.mcp_server.tool import MOST_CHARACTERS, Tool, checked
from llmctl.terminal_text import printable
from llmctl.transport.commands import RUNNING, RunningCommands
from trainer.config.records.json_text import json_values

INSTRUCTIONS = """Pretraining of language models on clusters: find runs (runs, status), see why one failed (logs with \
rank=failed), read its numbers (metrics), check a config (dry_run), predict memory and cost (plan), and look up keys \
(explain). An error is one sentence with its cure, and an exit_code: 2 arguments, 3 config or profile, 4 cluster or \
scheduler, 5 run. Times are in seconds since 1970, memory in bytes."""


def serve(tools: Sequence[Tool]) -> None:
    """Answer calls of one client until it closes our standard input, or is gone.

    Reading calls that are not done then are left alone, and their commands are ended. Writing calls are done first.
    """
    commands = RunningCommands()

    def end(number: int, _: object) -> None:
        commands.end()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # Python's own handler of SIGINT would wait for the next line of the client.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("llmctl").setLevel(logging.INFO)
    RUNNING.set(commands)
    try:
        anyio.run(_serve, {tool.name: tool for tool in tools})
    except Exception as error:
        if not is_disconnect(error):
            raise
    finally:
        commands.end()


async def _serve(tools: Mapping[str, Tool]) -> None:
    async def on_list_tools(_: ServerRequestContext[Any], __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[_listed(tool) for tool in tools.values()])

    async def on_call_tool(_: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        tool = tools.get(params.name)
        if tool is None:
            hint = "; llmctl mcp --allow-submit has it" if params.name in _WRITING else ""
            words = f"there is no tool {params.name!r}; the tools are {', '.join(tools)}{hint}"
            raise MCPError(code=INVALID_PARAMS, message=printable(words))
        values = params.arguments or {}
        # A cancelled read is left alone; a submission that has begun is carried to its end.
        return await anyio.to_thread.run_sync(_call, tool, values, abandon_on_cancel=not tool.writes)

    server = Server(
        "llmctl",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=on_list_tools,
        on_call_tool=on_call_tool,
    )
    async with connected() as (received, sent):
        await server.run(received, sent, server.create_initialization_options())


_WRITING = frozenset(tool.name for tool in jobs.WRITING_TOOLS)


def tools_of(more: Sequence[Tool], *, allow_submit: bool) -> tuple[Tool, ...]:
    """The tools of a server.

    Args:
        more: tools that read nothing of a run.
        allow_submit: also those that submit, resume and cancel.
    """
    return (*reading.TOOLS, *jobs.TOOLS, *more, *(jobs.WRITING_TOOLS if allow_submit else ()))


def _listed(tool: Tool) -> ListedTool:
    notes = ToolAnnotations(
        read_only_hint=not tool.writes,
        destructive_hint=tool.destroys,
        idempotent_hint=not tool.writes or tool.destroys,
        open_world_hint=True,
    )
    return ListedTool(
        name=tool.name,
        description=tool.description,
        input_schema=tool.arguments.model_json_schema(),
        annotations=notes,
    )


def _call(tool: Tool, values: Mapping[str, Any]) -> CallToolResult:
    """Call a tool; errors are those of the commands. Runs in a thread of its own."""
    if tool.writes:
        RUNNING.set(None)  # in this call alone: its commands are carried to their end
    with _heard() as messages:
        try:
            answer = tool.call(checked(tool, values))
            document = {**json_values(plain(answer.document)), "messages": messages}
            text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
            if len(text) > MOST_CHARACTERS:
                raise UsageError(
                    f"{tool.name}: the answer has {len(text):,} characters, above {MOST_CHARACTERS:,}; ask for less"
                )
        except LlmctlError as error:
            return _failed(error.message, error.exit_code, messages)
        except Exception as error:
            known = system_error(error) if isinstance(error, (OSError, RecursionError)) else None
            if known is not None:
                return _failed(known.message, known.exit_code, messages)
            traceback.print_exc(file=sys.stderr)
            return _failed(f"internal error: {type(error).__name__}: {error}", BUG, messages)
    # Clients that do not know structured content read the second text.
    content = [TextContent(text=printable(answer.text)), TextContent(text=text)]
    return CallToolResult(content=[*content], structured_content=document)


def _failed(message: str, exit_code: int, messages: list[str]) -> CallToolResult:
    words = printable(message)
    document = {"error": words, "exit_code": exit_code, "messages": messages}
    return CallToolResult(content=[TextContent(text=words)], structured_content=document, is_error=True)


@contextmanager
def _heard() -> Iterator[list[str]]:
    """The messages of this thread's call, which a command would have printed on standard error."""
    messages: list[str] = []
    own = threading.get_ident()

    class Listener(logging.Handler):
        """Keeps the messages of this thread."""

        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == own:
                messages.append(record.getMessage())

    logger, listener = logging.getLogger("llmctl"), Listener()
    logger.addHandler(listener)
    try:
        yield messages
    finally:
        logger.removeHandler(listener)
