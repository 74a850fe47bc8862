"""Where the jobs of tests find the library of kernels: else each site, with a runs_root of its own, would build one."""

import os
import shlex


def of_these_tests() -> str:
    """A line for a profile's ``environment.setup``."""
    return f"export LLMCTL_CACHE_DIR={shlex.quote(os.environ['LLMCTL_CACHE_DIR'])}"
