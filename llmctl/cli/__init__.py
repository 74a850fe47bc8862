"""One file per command: parse the flags, call, print."""

import gc

# A command lives for a moment, and what its imports make stays: looking through it for garbage at every 700th object
# is time lost. A command that goes on, such as `logs -f`, still collects.
gc.set_threshold(200_000, 10, 10)
