"""End of a rank whose launcher is gone, and of a command whose llmctl is gone. Torch-free.

A launcher that is killed by SIGKILL cannot end its ranks. They would train on without a supervisor, and write into the
run directory beside the ranks of the next start. So would ``data prepare`` go on, and lock out the next start.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

_POLL_S = 1.0


def end_with_parent(parent: int) -> None:
    """End this process within about a second of the end of its parent, from a thread, whatever the main thread does.

    No save: the ranks of other nodes are about to fail, and the last checkpoint is complete. Does nothing for a process
    whose parent is init, or has ended already.
    """
    if parent > 1:
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    waiting = threading.Event()
    # The kernel gives an orphan another parent (prctl(2), PR_SET_CHILD_SUBREAPER).
    while os.getppid() == parent:
        waiting.wait(_POLL_S)
    print(f"trainer: its parent, process {parent}, is gone; ending", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
