"""Help of every command: pages of typer's commands, and their look on a terminal."""
