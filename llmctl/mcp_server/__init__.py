"""The MCP server: what commands and the Python API give, as tools for coding agents.

It needs the package ``mcp``; only ``llmctl mcp`` imports this room.
"""
