"""Shared cache of the kernel library for test jobs, so that not every site builds one."""

import os
import shlex


def of_these_tests() -> str:
    """Line for a profile's ``environment.setup``."""
    return f"export LLMCTL_CACHE_DIR={shlex.quote(os.environ['LLMCTL_CACHE_DIR'])}"
