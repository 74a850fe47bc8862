"""One file per command: parse the flags, call, print."""
