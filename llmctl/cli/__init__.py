"""One file per command: parse the flags, call, print."""

import gc

# A command is short-lived, and imported objects stay: a garbage collection after every 700 allocations is wasted time.
# A long command, such as `logs -f`, still collects.
gc.set_threshold(200_000, 10, 10)
