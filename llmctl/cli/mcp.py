"""``llmctl mcp``: a server of the Model Context Protocol over standard input and output."""

import sys
from importlib.util import find_spec

import typer

from llmctl.context import say
from llmctl.errors import UsageError

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def mcp(
    allow_submit: bool = typer.Option(False, "--allow-submit", help="Add tools that submit, resume and cancel runs."),
) -> None:
    """Serve tools for coding agents: runs, logs, metrics, plans and checks, by the Model Context Protocol.

    An MCP client starts it: docs/guide/agents.md. Without --allow-submit, no tool writes, submits or ends anything.
    """
    if find_spec("mcp_types") is None:
        raise UsageError("mcp: needs the package mcp, 2.3 or later; install it: pip install 'llmctl-pretrain[mcp]'")
    from llmctl.cli.reference.tools import TOOLS
    from llmctl.mcp_server.server import serve, tools_of

    if sys.stdin.isatty():
        say("mcp: waits for an MCP client on standard input (docs/guide/agents.md); Ctrl-C ends it")
    serve(tools_of(TOOLS, allow_submit=allow_submit))
