"""The connection to the client over standard input and output. A line that is not a message gets an error."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp_types import INVALID_REQUEST, PARSE_ERROR, ErrorData, JSONRPCError
from pydantic import ValidationError


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Any, Any]]:
    """The stream of the client's messages, and the stream of ours.

    The SDK drops a line that is not a message without a word, and its client would wait for an answer.
    """
    async with stdio_server() as (received, sent), anyio.create_task_group() as group:
        forward, messages = anyio.create_memory_object_stream[SessionMessage | Exception]()

        async def pass_on() -> None:
            async with forward:
                async for message in received:
                    if not isinstance(message, Exception):
                        await forward.send(message)
                    elif (answer := _answer(message)) is not None:
                        logging.getLogger("llmctl").warning("mcp: %s", answer.error.message)
                        await sent.send(SessionMessage(answer))

        group.start_soon(pass_on)
        yield messages, sent
        group.cancel_scope.cancel()


def _answer(problem: Exception) -> JSONRPCError | None:
    """The answer to a line that is not a message; None to an empty line."""
    found = problem.errors() if isinstance(problem, ValidationError) else []
    for error in found:
        if error["type"] == "json_invalid":
            if not str(error["input"]).strip():
                return None
            words = f"a line of standard input is not JSON: {error['ctx']['error']}"
            return _error(None, PARSE_ERROR, f"{words}; write one message of JSON-RPC 2.0 in each line")
    # Of the kinds of messages, each names the fields that it lacks.
    lacking = (error["input"] for error in found if error["type"] == "missing")
    whole = next((each for each in lacking if isinstance(each, dict) and "method" in each), {})
    words = "a line of standard input is JSON, but not a message of JSON-RPC 2.0"
    return _error(whole.get("id"), INVALID_REQUEST, f"{words}; give jsonrpc, id, method and params")


def _error(identity: Any, code: int, words: str) -> JSONRPCError:
    is_known = isinstance(identity, (int, str)) and not isinstance(identity, bool)
    return JSONRPCError(jsonrpc="2.0", id=identity if is_known else None, error=ErrorData(code=code, message=words))


def is_disconnect(error: BaseException) -> bool:
    """True if an error, or each error of a group, only says that the client has left."""
    inner = getattr(error, "exceptions", None)
    return isinstance(error, BrokenPipeError) if inner is None else all(map(is_disconnect, inner))
