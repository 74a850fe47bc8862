"""The cause of a failed step, from the last lines of its output. Pure."""

import re

# In order: the first that matches is told. pip reports a missing distribution after each network error, too.
_CAUSES = (
    (r"No space left on device|Disk quota exceeded",
     "the disk or your quota is full: free some space, or choose another folder with --path"),
    (r"this Python is \d+\.\d+; the environment needs|requires a different Python|is not a supported wheel",
     "another Python is needed: --python FILE, or a module of Python 3.10 or later in environment.modules"),
    (r"module: (?:command )?not found|the module function is not defined|llmctl: module load .* failed",
     "the modules cannot be loaded: `module avail` on the cluster shows their names; set environment.modules and "
     "environment.module_init, the file that defines `module`"),
    (r"ensurepip is not available|No module named '?(?:venv|ensurepip)",
     "this Python cannot make environments: install its package venv (Debian: python3-venv), or --python FILE"),
    (r"No module named '?pip", "the environment has no pip: --python FILE with another Python"),
    (r"Could not resolve host|Name or service not known|[Tt]emporary failure in name resolution|"
     r"Network is unreachable|Failed to establish a new connection|Connection refused|Connect(?:ion)?\w* timed out|"
     r"ProxyError|Read timed out",
     "no network from there: set a proxy in the profile's env (HTTPS_PROXY), or bring the wheels: on a machine with "
     "network `pip wheel -w FOLDER ...`, copy FOLDER to the cluster, and --find-links FOLDER"),
    (r"No matching distribution found for (?P<what>\S+)",
     "no wheel of {what} for this Python and machine in the index or folder: choose another version, --index-url, "
     "or add the wheel to the folder of --find-links"),
    (r"(?:nvcc|CUDA_HOME)[^\n]*(?:not found|No such file|not set|could not be found)",
     "no CUDA compiler: add a module that has nvcc to environment.modules, of the CUDA version of torch"),
    (r"Python\.h: No such file", "no header files of Python: --python FILE with another Python, or python3-dev"),
    (r"(?:gcc|g\+\+|cc|c\+\+|clang)\S*: (?:command )?not found|command '[^']*(?:gcc|g\+\+|cc|c\+\+)' failed: "
     r"No such file|No such file or directory: '[^']*(?:gcc|g\+\+|cc|c\+\+)'|No CMAKE_CXX_COMPILER",
     "no C++ compiler: add a module that has g++ to environment.modules"),
    (r"Permission denied", "you may not write there: choose another folder with --path"),
    (r"\bKilled\b|MemoryError|Cannot allocate memory", "the memory ran out: a --resource-type with more of it"),
    (r"command not found|No such file or directory", "a program or file is missing; see the lines above"),
)  # fmt: skip


def cause_of(output: str) -> str:
    """A sentence with what was missing and the remedy; empty if unknown.

    Args:
        output: the end of a step's output.
    """
    for pattern, cause in _CAUSES:
        found = re.search(pattern, output)
        if found is not None:
            return cause.format(**found.groupdict())
    return ""
